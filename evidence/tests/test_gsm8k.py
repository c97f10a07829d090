"""The figures of GSM8K's page are those of the run and of `dapo eval`, at a tiny size."""

import json
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from dapo.runs.metrics_file import read_metrics
from dapo.training.train import train
from evidence.gsm8k import MARKER, answers, count_calculations, draw, summarize, write_page
from helpers.commands import run as command
from helpers.tiny_runs import new_run, tiny

STEPS = 2
DATA = '{"builtin": {"sums": {}}, "size": 8, "seed": 2}'


def evaluate(capsys: pytest.CaptureFixture[str], model: str, output: Path, *options: str) -> None:
    arguments = ["--data", DATA, "--samples-per-problem", "4", "--output", str(output)]
    judged = ["rollout.max_response_tokens=8", "reward.verifier=dapo.rewards.examples:has_digit"]
    code, _, err = command(capsys, "eval", model, *arguments, *judged, *options)
    assert code == 0, err


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    with new_run(tiny("data.eval=null", f"train.num_steps={STEPS}"), tmp_path / "dapo-0") as run:
        train(run)
    (tmp_path / "evals").mkdir()
    evaluate(capsys, "tiny-random", tmp_path / "evals/warm.json")
    evaluate(capsys, str(tmp_path / "dapo-0"), tmp_path / "evals/dapo-0.json")
    return tmp_path


def test_accuracies_are_those_of_the_evaluations_and_costs_those_of_the_run(folder: Path) -> None:
    results = summarize(folder)
    assert list(results) == ["dapo-0", "warm"]
    evaluations = {
        name: json.loads((folder / f"evals/{name}.json").read_text("utf-8")) for name in results
    }
    for name, evaluation in evaluations.items():
        assert results[name]["accuracy"] == evaluation["accuracy"]
        assert results[name]["samples_per_problem"] == 4
    row = results["dapo-0"]
    expected = evaluations["dapo-0"]["accuracy"] - evaluations["warm"]["accuracy"]
    assert row["difference"] == pytest.approx(expected)
    assert row["difference_low"] <= row["difference"] <= row["difference_high"]
    responses = [
        response
        for path in (folder / "dapo-0/rollouts").glob("*.parquet")
        for response in read_table(path).to_pylist()
    ]
    assert row["generated_tokens"] == sum(each["response_tokens"] for each in responses)
    assert row["steps"] == len(row["curve"]) == STEPS
    rows = [each for each in read_metrics(folder / "dapo-0/metrics.jsonl") if each["step"] > 0]
    first, second = (each["rollout/tokens_generated"] / each["time/generate_s"] for each in rows)
    assert row["sampled_tokens_per_s"] == pytest.approx((first + second) / 2)
    assert row["seconds"] == pytest.approx(2 * row["step_s"])
    assert row["updated_tokens_per_s"] > 0


def test_an_evaluation_before_the_end_of_a_run_costs_the_steps_until_then(folder: Path) -> None:
    evaluation = json.loads((folder / "evals/dapo-0.json").read_text("utf-8"))
    assert evaluation["step"] == STEPS
    (folder / "evals/dapo-0_early.json").write_text(json.dumps(evaluation | {"step": 1}), "utf-8")
    results = summarize(folder)
    early, late = (results[name] for name in ("dapo-0_early", "dapo-0"))
    assert (early["steps"], late["steps"]) == (1, STEPS)
    assert early["curve"] == late["curve"][:1]
    assert early["generated_tokens"] < late["generated_tokens"]


def test_the_page_has_a_row_for_each_evaluation_and_is_written_again_without_a_change(
    folder: Path,
) -> None:
    results = summarize(folder)
    page = folder / "page.md"
    page.write_text(f"before\n{MARKER}\nold\n{MARKER}\nafter\n", "utf-8")
    write_page(page, results)
    text = page.read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == [
        "|",
        "| after the worked solutions",
        "| DAPO, seed 0",
        "|",
        "| DAPO",
    ]
    assert f"{100 * results['dapo-0']['accuracy']:.1f} (" in rows[2]
    assert "old" not in text
    assert (text.startswith("before\n"), text.endswith("after\n")) == (True, True)
    write_page(page, results)
    assert page.read_text("utf-8") == text
    (folder / "evals/dapo-0_again.json").write_bytes((folder / "evals/dapo-0.json").read_bytes())
    write_page(page, summarize(folder))
    assert page.read_text("utf-8").count("| DAPO, seed 0 |") == 2
    page.write_text("no marker\n", "utf-8")
    with pytest.raises(SystemExit, match="two markers"):
        write_page(page, results)
    draw(summarize(folder), folder / "picture.png")
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_each_way_of_sampling_has_its_own_table_and_its_own_warm_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = "eval.top_p=1"
    evaluate(capsys, "tiny-random", folder / "evals/warm_free.json", free)
    evaluate(capsys, str(folder / "dapo-0"), folder / "evals/dapo-0_free.json", free)
    results = summarize(folder)
    for note in ("", "_free"):
        gain = results[f"dapo-0{note}"]["accuracy"] - results[f"warm{note}"]["accuracy"]
        assert results[f"dapo-0{note}"]["difference"] == pytest.approx(gain)
    page = folder / "page.md"
    page.write_text(f"{MARKER}\n{MARKER}\n", "utf-8")
    write_page(page, results)
    lines = page.read_text("utf-8").splitlines()
    places = [lines.index(f"Sampled at temperature 1{end}:") for end in ("", ", top-p 0.7")]
    for place, note in zip(places, ("_free", ""), strict=True):
        accuracy = 100 * results[f"warm{note}"]["accuracy"]
        assert lines[place + 4].startswith(f"| after the worked solutions | {accuracy:.1f} (")


def test_wrong_calculations_are_those_whose_result_is_another_number() -> None:
    texts = [
        "2 + 3 = 5, 1,000*2 = $2,000, 10/4=2.5, 1/3 = 0.33",
        "20 x 2 = 41 and 6 - 2 = 4.",
        "150% x $80,000 = $100,000 is no calculation of numbers alone; 7 / 0 = 7 has no value",
    ]
    assert count_calculations(texts) == (6, 1, 1)


def test_answers_are_shown_of_the_first_problems_that_are_gained_kept_and_never_solved() -> None:
    def evaluation(*verdicts: str) -> dict[str, object]:
        rows = [
            {
                "question": f"question {number}",
                "answer": str(number),
                "accuracy": word.count("r") / len(word),
                "responses": [
                    {"text": f"{letter} {place}", "correct": letter == "r"}
                    for place, letter in enumerate(word)
                ],
            }
            for number, word in enumerate(verdicts)
        ]
        return {"table": rows}

    before = evaluation("wwwr", "wwww", "rrrr", "wwww", "wrrr", "wwww")
    after = evaluation("rrrr", "wwrr", "wwww", "wrrr", "wrrr", "wwww")
    assert list(answers(before, after)) == [
        ("gained", "question 3", "w 0", "r 1", "3"),
        ("solved by both", "question 4", "r 1", "r 1", "4"),
        ("solved by neither", "question 5", "w 0", "w 0", "5"),
    ]
