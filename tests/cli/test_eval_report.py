"""What `dapo eval` prints: no figure twice, no name cut to that of another, intervals or why there
is none.
"""

from pathlib import Path
from typing import Any

import pytest

from dapo.api.result_types import EvaluationResult
from dapo.cli.eval_report import (
    _paired_problem_table,
    _problem_table,
    print_evaluation,
    short_names,
)
from dapo.cli.train import report
from dapo.config import load_config
from dapo.evaluation.pairing import paired_difference
from dapo.evaluation.scores import Evaluation, EvaluationPlan, JudgedProblem, JudgedResponse
from dapo.runs.console import SafeConsole, final_report
from dapo.runs.evaluations import write_evaluation
from dapo.types import Problem
from helpers.run_files import new_run


def response(mark: str) -> JudgedResponse:
    """`r`: right, `w`: wrong, `e`: no verdict, a digit: a score of so many tenths."""
    if mark == "e":
        return JudgedResponse("", None, 0.0, "timed out", None, 3, "stop")
    correct = {"r": True, "w": False}.get(mark)
    score = int(mark) / 10 if correct is None else float(2 * correct - 1)
    return JudgedResponse("", correct, score, None, {"r": "4 km", "w": "5"}.get(mark), 3, "stop")


def result(model: str, *marks: str) -> dict[str, Any]:
    """An evaluation as in a file: a string of marks for each problem."""
    problems = tuple(
        JudgedProblem(Problem(str(i), f"question {i}", "4"), tuple(map(response, row)))
        for i, row in enumerate(marks)
    )
    evaluation = Evaluation(EvaluationPlan("toy", len(marks[0]), 1.0, 0.7, 20, (9,), 0), problems)
    return {"model": model, **evaluation.summary(), "table": evaluation.table()}


def printed(
    capsys: pytest.CaptureFixture[str], found: dict[str, Any], *, by_problem: bool = False
) -> str:
    print_evaluation(found, None, by_problem=by_problem)
    return capsys.readouterr().out


def compared(
    capsys: pytest.CaptureFixture[str],
    first: dict[str, Any],
    second: dict[str, Any],
    *,
    by_problem: bool = False,
) -> str:
    difference = paired_difference(first, second)
    print_evaluation(
        {"first": first, "second": second, "comparison": difference}, None, by_problem=by_problem
    )
    return capsys.readouterr().out


def test_pass_at_1_is_printed_only_where_it_is_not_avg_at_k(capsys: pytest.CaptureFixture[str]):
    one = printed(capsys, result("m", "r", "w"))
    assert "avg@1" in one
    assert "pass@" not in one
    two = printed(capsys, result("m", "rw", "ww"))
    assert [name in two for name in ("avg@2", "pass@1", "pass@2", "cons@2")] == [
        True,
        False,
        True,
        True,
    ]
    # 1 - 2/3 is not 1/3
    assert "pass@1" not in printed(capsys, result("m", "rww", "www"))
    incomplete = printed(capsys, result("m", "rw", "re"))
    assert [name in incomplete for name in ("avg@2", "pass@1", "pass@2")] == [True, True, True]
    assert [
        line.split()[-2] for line in incomplete.splitlines() if "pass@j over problems" in line
    ] == ["1"]


def test_scores_without_an_interval_say_so_and_are_no_percentages(
    capsys: pytest.CaptureFixture[str],
):
    text = printed(capsys, result("m", "55", "55"), by_problem=True)
    assert "mean score, avg@2" in text
    assert "0.5000 (no interval)" in text
    assert "no interval: fewer than two problems" in text
    assert "(reward.threshold decides)" in text
    (row,) = [line for line in text.splitlines() if "question 0" in line]
    assert row.split("│")[4].strip() == "-"


def test_right_answers_are_shown_as_the_most_frequent_one(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, result("m", "rrw", "wwr"), by_problem=True)
    rows = {
        line.split("│")[1].strip(): line.split("│")[6].strip()
        for line in text.splitlines()
        if "question" in line
    }
    assert rows == {"question 0": "4 km", "question 1": "5"}


def test_a_response_that_could_not_be_sampled_has_no_length(capsys: pytest.CaptureFixture[str]):
    lost = JudgedResponse("", None, 0.0, "lost connection", None, 0, None)
    rows = [
        JudgedProblem(Problem(name, name, "4"), responses).row()
        for name, responses in (("half", (response("r"), lost)), ("none", (lost, lost)))
    ]
    SafeConsole().print(_problem_table(rows))
    text = capsys.readouterr().out
    tokens = {
        line.split("│")[1].strip(): line.split("│")[5].strip()
        for line in text.splitlines()
        if "│" in line
    }
    assert tokens == {"half": "3", "none": ""}


def test_two_files_of_one_folder_are_named_by_their_steps(capsys: pytest.CaptureFixture[str]):
    folder = "runs/a_long_name_of_a_run_with_all_its_options_in_it/eval"
    first, second = (result(f"{folder}/step_0000{step}.json", "rw", "ww") for step in ("00", "20"))
    text = compared(capsys, first, second)
    heading = text[: text.index("avg@2")]
    columns = [
        "".join(line.split("┃")[i].strip() for line in heading.splitlines() if "┃" in line)
        for i in (2, 3)
    ]
    assert columns == ["step 0", "step 20"]


def test_two_evaluations_of_one_run_are_told_apart_by_the_step_of_their_checkpoints(
    capsys: pytest.CaptureFixture[str],
):
    early = result("runs/a", "rw", "ww") | {"step": 20}
    late = result("runs/a", "rw", "rw") | {"step": 60}
    heading = compared(capsys, early, late).partition("avg@2")[0]
    assert "runs/a step 20" in heading
    assert "runs/a step 60" in heading
    assert "runs/a step 60 on toy" in printed(capsys, late)


def test_a_comparison_by_problem_has_a_line_for_each_from_worse_to_better(
    capsys: pytest.CaptureFixture[str],
):
    first = result("a", "rw", "ww", "rr", "rr")
    second = result("b", "rr", "ww", "rw", "ee")
    text = compared(capsys, first, second, by_problem=True)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if "question" in line
    ]
    assert rows == [
        ["question 2", "4", "1.000", "0.500", "-0.500"],
        ["question 1", "4", "0.000", "0.000", "+0.000"],
        ["question 0", "4", "0.500", "1.000", "+0.500"],
        ["question 3", "4", "1.000", "", ""],
    ]
    assert "question" not in compared(capsys, first, second)


def test_figures_that_only_the_second_result_has_are_shown_and_notes_name_their_result(
    capsys: pytest.CaptureFixture[str],
):
    def of_two_sources(model: str, *marks: str) -> dict[str, Any]:
        problems = tuple(
            JudgedProblem(Problem(str(i), "q", "4", source=source), tuple(map(response, row)))
            for i, (source, row) in enumerate(zip(("s1", "s1", "s2"), marks, strict=True))
        )
        found = Evaluation(EvaluationPlan("toy", 2, 1.0, 0.7, 20, (9,), 0), problems)
        return {"model": model, **found.summary(), "table": found.table()}

    first = of_two_sources("a", "re", "ee", "ee")
    text = compared(capsys, first, of_two_sources("b", "rr", "rw", "ww"))
    rows = {
        cells[0]: cells[1:]
        for cells in (
            [cell.strip() for cell in line.split("│")[1:-1]]
            for line in text.splitlines()
            if "│" in line
        )
    }
    assert rows["s1 (1 and 2 problems)"] == ["1.000", "0.750"]
    assert rows["s2 (0 and 1 problems)"] == ["", "0.000"]
    assert [cell.split(" ")[0] for cell in rows["pass@2"]] == ["", "66.7%"]
    assert "\na: 5 of 6 responses have no verdict: timed out\n" in text


def test_a_comparison_without_an_interval_or_without_pairs_says_so(
    capsys: pytest.CaptureFixture[str],
):
    equal = compared(capsys, result("a", "22", "44"), result("b", "33", "55"))
    assert "+0.1000 (no interval: fewer than two problems, or the same" in equal
    assert "no problem has a verdict in both" in compared(
        capsys, result("a", "e"), result("b", "r")
    )
    assert "95 % interval" in compared(capsys, result("a", "rw", "ww"), result("b", "rr", "ww"))


def test_an_evaluation_without_any_verdict_shows_no_percentage_but_that_nothing_was_judged(
    capsys: pytest.CaptureFixture[str],
):
    nothing = result("m", "ee", "ee")
    text = printed(capsys, nothing, by_problem=True)
    assert [line.split("│")[2].strip() for line in text.splitlines() if "avg@2" in line] == [
        "nothing judged"
    ]
    assert (
        "nothing judged: no response has a verdict\n4 of 4 responses have no verdict: timed out\n"
        in text
    )
    final_report(SafeConsole(), before=nothing, after=result("m", "rr", "rr"), samples=[], files={})
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["nothing judged", "100.0%"]
    python = repr(EvaluationResult.of(nothing))
    assert (
        python
        == "<toy: avg@2 nothing judged on 2 problems; 4 responses without a verdict: timed out>"
    )


def test_the_end_of_a_run_says_where_its_evaluations_are_of_other_problems(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """A fork with another data.eval has its parent's first evaluation."""
    said = "the two evaluations are not comparable: 1 problems are only in one of them"
    for name, marks in (("other", ("rr", "ww", "ww")), ("same", ("rr", "ww"))):
        run = new_run(tmp_path / name)
        for step, found in ((0, result("m", "rw", "rw")), (4, result("m", *marks))):
            write_evaluation(run, step, found, found["table"])
        report(load_config(run.config), run)
        assert (said in " ".join(capsys.readouterr().out.split())) == (name == "other")


def test_names_lose_the_folders_that_they_share_and_steps_are_called_steps():
    first, last = (f"runs/quickstart/eval/step_{step:06}.json" for step in (0, 18))
    assert short_names([first, last]) == ["step 0", "step 18"]
    assert short_names([first, first.replace("quickstart", "b")]) == [
        "quickstart/eval/step 0",
        "b/eval/step 0",
    ]
    assert short_names(["Qwen/Qwen2.5-0.5B", "runs/b"]) == ["Qwen/Qwen2.5-0.5B", "runs/b"]


def test_heads_of_the_tables_by_problem_are_whole_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    responses = [{"error": None, "correct": True, "answer": "42", "tokens": 9, "finish": "stop"}]
    row = {
        "id": "1",
        "question": "Which is the largest? " * 9,
        "answer": "42",
        "accuracy": 0.5,
        "responses": responses,
    }
    for table in (_problem_table([row, row]), _paired_problem_table([row], [row])):
        SafeConsole().print(table)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    heads = [
        "problem",
        "answer",
        "score",
        "correct",
        "tokens",
        "most frequent answer",
        "first",
        "second",
        "difference",
    ]
    for head in heads:
        assert f" {head} " in text
    assert text.count("│ Which is") == 3  # one line per problem
