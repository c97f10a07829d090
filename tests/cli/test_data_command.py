"""`dapo data`: what each command writes and prints; bad input is one error message and writes
nothing.
"""

import json
import re
from pathlib import Path

import pytest

from dapo.cli.main import main
from dapo.data.problems import load_problems
from dapo.sampling.problem_stats import ProblemStats, write_problem_stats
from dapo.types import Group, Problem, Verdict
from helpers.run_files import new_run

NUMBERS = [
    (9, 2),
    (12, 5),
    (15, 4),
    (20, 6),
    (31, 7),
    (44, 8),
    (50, 9),
    (61, 10),
    (77, 11),
    (83, 12),
]
QUESTIONS = [
    (
        f"How many of the {n} apples are left when {k} are eaten by {n - k} hungry children?"
        if n % 2 == 0
        else (
            f"Of {n} eggs a basket holds {k}, and each further one holds {n - k}; find the number"
            " of baskets."
        )
    )
    for n, k in NUMBERS
]
BEFORE = "Solve the following math problem step by step and say the answer:"


def run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as stopped:
        main(["data", *map(str, arguments)])
    return (stopped.value.code or 0, *capsys.readouterr())


def group_of(problem_id, verdicts):
    return Group(
        Problem(problem_id, "?", "!"),
        (1,),
        (),
        tuple(Verdict(correct, 0.0) for correct in verdicts),
    )


@pytest.fixture
def released(tmp_path) -> Path:
    """Ten problems with a hundred copies each, in the layout of the released files, as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [
                {
                    "content": f"{BEFORE}\n\n{question}\n\nRemember to put it on a line.",
                    "role": "user",
                }
            ],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{n}"},
            "__index_level_0__": copy * len(QUESTIONS) + n,
        }
        for copy in range(100)
        for n, question in enumerate(QUESTIONS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "released.parquet")
    return tmp_path / "released.parquet"


def counts(output):
    """The last number of each line of a table."""
    found = re.findall(r"│ (.*?) +│ +([\d,]+) │", output)
    return {name: int(number.replace(",", "")) for name, number in found}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_import_writes_what_reads_back_equal(tmp_path, capsys, released, ending):
    out = tmp_path / f"out.{ending}"
    code, output, _ = run(capsys, "import", released, out)
    assert (code, output) == (0, f"{out}: 1,000 problems, 10 distinct\n")
    before = load_problems(str(released))
    after = load_problems(str(out))
    assert [(p.id, p.prompt, p.answer, p.source) for p in after] == [
        (p.id, p.prompt, p.answer, p.source) for p in before
    ]
    assert set(tmp_path.iterdir()) == {released, out}


def test_import_takes_a_mapping(tmp_path, capsys):
    spec = "{builtin: {sums: {terms: 3}}, size: 7, seed: 2}"
    assert run(capsys, "import", spec, tmp_path / "out.jsonl")[0] == 0
    written = load_problems(str(tmp_path / "out.jsonl"))
    assert [p.id for p in written] == [
        p.id for p in load_problems({"builtin": {"sums": {"terms": 3}}, "size": 7, "seed": 2})
    ]
    assert {p.source for p in written} == {"sums"}


def test_import_reports_problems_with_different_answers(tmp_path, capsys):
    rows = [("1+1", "2"), ("1+1", "3"), ("2+2", "4"), ("3+3", "6"), ("3+3", "6.0"), ("1+1", "2")]
    spec = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    spec.write_text("\n".join(lines))
    code, output, _ = run(capsys, "import", spec, tmp_path / "out.jsonl")
    assert code == 0
    assert output.splitlines()[1:] == [
        "1 problem with different answers, so one row rewards what another refuses: '1+1' has 2 and"
        " 3; dapo data dedupe keeps the answer of most rows"
    ]


def test_dedupe_collapses_hundredfold_copies(tmp_path, capsys, released):
    out = tmp_path / "out.parquet"
    code, output, _ = run(capsys, "dedupe", released, out)
    assert code == 0
    table = counts(output)
    assert (table["rows"], table["removed: exact duplicate"], table["kept"]) == (1000, 990, 10)
    assert [p.id for p in load_problems(str(out))] == [
        p.id for p in load_problems(str(released))[:10]
    ]
    removed = [
        json.loads(line)
        for line in (tmp_path / "out.parquet.removed.jsonl").read_text().splitlines()
    ]
    assert [(line["row"], line["copy_of_row"]) for line in removed] == [
        (n, (n - 1) % 10 + 1) for n in range(11, 1001)
    ]


def test_decontaminate_reports_the_matching_text(tmp_path, capsys, released):
    held_out = tmp_path / "held.jsonl"
    held_out.write_text(json.dumps({"prompt": f"Please: {QUESTIONS[3]}", "answer": "14"}) + "\n")
    out = tmp_path / "out.jsonl"
    code, output, _ = run(
        capsys, "decontaminate", released, out, "--against", held_out, "--against", "builtin:gcd"
    )
    assert code == 0
    table = counts(output)
    assert (table["removed"], table["kept"], table["evaluation problems found"]) == (100, 900, 1)
    line = json.loads((tmp_path / "out.jsonl.removed.jsonl").read_text().splitlines()[0])
    assert line["question"] == QUESTIONS[3]
    assert (
        line["matching_text"]
        == "how many of the 20 apples are left when 6 are eaten by 14 hungry children"
    )
    assert line["against_answer"] == "14"
    # 16 words have 9 n-grams of eight words, and `Please` makes one more
    assert line["overlap"] == 0.9


def test_stats_counts_and_joins_the_pass_rates_of_a_run(tmp_path, capsys, released):
    ids = [p.id for p in load_problems(str(released))[:10]]
    run_dir = tmp_path / "run"
    new_run(run_dir)
    arguments = ["stats", released, "--run", run_dir, "--group-size", "2"]
    code, _, err = run(capsys, *arguments)
    assert (code, err) == (
        2,
        (
            f"error: {run_dir} has no problems.parquet yet; a run writes it with its first"
            " checkpoint\n"
        ),
    )
    # for each step: verdicts by problem id; None where the verifier only gives a score
    verdicts = {
        ids[0]: [True] * 4,
        ids[1]: [True, False, False, False],
        "other": [False] * 4,
        ids[2]: [None] * 4,
    }
    statistics = ProblemStats()
    for step in (1, 2):
        statistics.record([group_of(*item) for item in verdicts.items()], step=step)
    write_problem_stats(run_dir / "problems.parquet", statistics.table())
    out = tmp_path / "stats.json"
    code, output, _ = run(capsys, *arguments, "--output", out)
    assert code == 0
    assert "990 (at most 100 rows per problem)" in output
    assert (
        "expected keep rate of dynamic sampling with groups of 2: 21.4% (each batch samples 4.7"
        " times its" in output
    )
    result = json.loads(out.read_text())
    assert (result["rows"], result["distinct"], result["instruction_before"]) == (1000, 10, BEFORE)
    assert result["run"]["histogram"] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    assert (result["run"]["unseen"], result["run"]["not_in_data"]) == (8, 1)
    assert result["run"]["expected_keep_rate"] == pytest.approx((0 + 12 / 28) / 2)
    assert result["table"][1]["run"] == {
        "id": ids[1], "pass_rate": 0.25, "responses": 8, "correct": 2, "visits": 2, "last_seen": 2,
    }  # fmt: skip
    assert result["table"][2]["run"] is None


def test_square_brackets_in_data_are_shown_as_they_are(tmp_path, capsys):
    rows = [
        {"prompt": f"[INST] be [bold]brief about [/INST] {n}", "answer": "1", "source": "[/b]"}
        for n in range(9)
    ]
    (tmp_path / "[in].jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output, _ = run(capsys, "stats", tmp_path / "[in].jsonl")
    assert code == 0
    assert "[INST] be [bold]brief about [/INST]" in output
    assert "[/b] 9" in output
    assert run(capsys, "dedupe", tmp_path / "[in].jsonl", tmp_path / "[out].jsonl")[0] == 0


def test_stats_samples_a_model(tmp_path, capsys):
    out = tmp_path / "stats.json"
    options = ["--model", "tiny-random", "--samples", "3", "--problems", "2", "--output", out]
    judged = [
        "reward.verifier=dapo.rewards.examples:has_digit",
        "rollout.max_response_tokens=8",
        "reward.workers=1",
    ]
    code, output, _ = run(capsys, "stats", "{builtin: {sums: {}}, size: 12}", *judged, *options)
    assert code == 0
    result = json.loads(out.read_text())
    assert result["model"]["problems"] == 2
    assert result["model"]["responses"] == 6
    assert result["prompt_tokens"]["min"] > 0
    assert "3 responses per problem of tiny-random" in output
    code, output, _ = run(
        capsys, "stats", "builtin:sums", "--model", "tiny-random", "--samples", "0"
    )
    assert code == 0
    assert "prompt, tokens" in output
    assert "keep rate" not in output


def test_select_keeps_what_a_run_solved_at_times_and_lists_the_others(tmp_path, capsys, released):
    ids = [p.id for p in load_problems(str(released))[:10]]
    run_dir = tmp_path / "run"
    out = tmp_path / "out.jsonl"
    new_run(run_dir)
    statistics = ProblemStats()
    for step in (1, 2):
        verdicts = [[True] * 4, [True, False, False, False], [True, True, True, False], [False] * 4]
        statistics.record([group_of(*item) for item in zip(ids, verdicts, strict=False)], step=step)
    write_problem_stats(run_dir / "problems.parquet", statistics.table())
    code, output, _ = run(capsys, "select", released, out, "--rates", run_dir)
    assert code == 0
    assert counts(output) == {
        "rows": 1000, "kept": 200, "removed: pass rate too low": 100, "removed: pass rate too high": 100,
        "removed: not measured": 600,
    }  # fmt: skip
    assert "mean pass rate of the kept rows, as measured: 50.0%" in output
    assert {problem.id for problem in load_problems(str(out))} == set(ids[1:3])
    assert len((tmp_path / "out.jsonl.removed.jsonl").read_text().splitlines()) == 800


def test_select_measures_a_model_on_every_row(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    judged = [
        "reward.verifier=dapo.rewards.examples:has_digit",
        "rollout.max_response_tokens=8",
        "reward.workers=1",
    ]
    arguments = [
        "--model",
        "tiny-random",
        "--samples",
        "4",
        "--low",
        "0",
        "--high",
        "0.5",
        "--json",
    ]
    code, output, _ = run(
        capsys, "select", "{builtin: {sums: {}}, size: 12}", out, *judged, *arguments
    )
    assert code == 0
    found = json.loads(output)
    removed = [
        json.loads(line) for line in (tmp_path / "out.jsonl.removed.jsonl").read_text().splitlines()
    ]
    assert found["counts"]["rows"] == 12 == found["counts"]["kept"] + len(removed)
    assert 0 <= found["mean_pass_rate"] <= 0.5
    assert all(row["reason"] == "pass rate too high" and row["pass_rate"] > 0.5 for row in removed)
    assert {row["responses"] for row in removed} <= {4}


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["import", "nowhere.jsonl", "{dir}/out.jsonl"], "nowhere.jsonl"),
        (["import", "builtin:sumz", "{dir}/out.jsonl"], "did you mean sums?"),
        (
            ["import", "{builtin: [", "{dir}/out.jsonl"],
            "{builtin: [': line 2: a value is missing, or a bracket is not closed",
        ),
        (
            ["import", "builtin:sums", "{dir}/out.csv"],
            "expected a file that ends in .jsonl or .parquet, got '.csv'",
        ),
        (["import", "builtin:sums", "{dir}/no/out.jsonl"], "there is no directory {dir}/no"),
        (
            ["import", "builtin:sums", "{dir}/there.jsonl"],
            "there.jsonl exists already; choose another name, or --force",
        ),
        (["dedupe", "builtin:sums", "{dir}/new.jsonl"], "new.jsonl.removed.jsonl exists already"),
        (
            ["decontaminate", "builtin:sums", "{dir}/out.jsonl", "--against", "no.jsonl"],
            "no data file no.jsonl",
        ),
        (
            ["select", "builtin:sums", "{dir}/out.jsonl"],
            "needs pass rates: give --rates FILE or RUN_DIR, or --model",
        ),
        (
            ["select", "builtin:sums", "{dir}/out.jsonl", "--rates", "{dir}/none"],
            "none cannot be read as pass rates",
        ),
        (
            ["select", "builtin:sums", "{dir}/out.jsonl", "--rates", "x", "--low", "0.9"],
            "--low 0.9 is above --high 0.8: no row would be kept",
        ),
        (
            ["select", "builtin:sums", "{dir}/out.jsonl", "train.seed=1", "--rates", "x"],
            "train.seed=1: options configure how a model is sampled; add --model",
        ),
        (["stats", "builtin:sums", "--run", "{dir}/none"], "no run directory {dir}/none"),
        (["stats", "builtin:sums", "--output", "{dir}/there.jsonl"], "there.jsonl exists already"),
        (
            ["stats", "builtin:sums", "eval.top_p=1"],
            "options configure how a model is sampled; add --model",
        ),
    ],
)
def test_bad_input_exits_2_with_one_message_and_writes_nothing(tmp_path, capsys, arguments, output):
    (tmp_path / "there.jsonl").write_text("precious")
    (tmp_path / "new.jsonl.removed.jsonl").write_text("precious")
    code, out, err = run(
        capsys, *(argument.replace("{dir}", str(tmp_path)) for argument in arguments)
    )
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert output.replace("{dir}", str(tmp_path)) in err
    assert err.count("\n") == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "there.jsonl": "precious",
        "new.jsonl.removed.jsonl": "precious",
    }


def test_force_overwrites_also_the_source_itself(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n' * 3)
    assert run(capsys, "dedupe", path, path, "--force")[0] == 0
    assert path.read_text() == '{"prompt": "q", "answer": "1", "source": "data"}\n'


def test_what_fails_while_it_is_written_leaves_the_old_file_and_nothing_else(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "q", "answer": "1"}\n{"prompt": [{"role": "user", "content": "q"}], "answer":'
        ' "1"}\n'
    )
    (tmp_path / "out.parquet").write_text("old")
    code, _, err = run(capsys, "import", tmp_path / "in.jsonl", tmp_path / "out.parquet", "--force")
    assert code == 2
    assert "write .jsonl instead" in err
    assert (tmp_path / "out.parquet").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_data_without_a_majority_answer_is_refused_whole(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "q", "answer": "1"}\n{"prompt": "q", "answer": "2"}\n'
    )
    code, _, err = run(capsys, "dedupe", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (code, err) == (2, "error: nothing would be left: all answers conflict\n")
    assert not (tmp_path / "out.jsonl").exists()


def test_import_with_drop_invalid_leaves_out_rows_and_lists_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    source = tmp_path / "bad.jsonl"
    out = tmp_path / "good.jsonl"
    source.write_text(
        '{"prompt": "1+1", "answer": "2"}\n{"prompt": \n{"prompt": "", "answer": "2"}\n'
    )
    code, _, err = run(capsys, "import", source, out)
    assert (code, out.exists()) == (2, False)
    assert err.startswith("error: 2 rows cannot be used:\n")
    assert err.endswith("--drop-invalid\n")
    code, text, _ = run(capsys, "import", source, out, "--drop-invalid")
    removed = tmp_path / "good.jsonl.removed.jsonl"
    assert (code, text) == (
        0,
        f"{out}: 1 problems, 1 distinct\n2 rows left out; {removed} lists the reasons\n",
    )
    errors = [json.loads(line)["error"] for line in removed.read_text().splitlines()]
    assert [error.split(": ")[0] for error in errors] == [f"{source}, line 2", f"{source}, line 3"]
    assert len(out.read_text().splitlines()) == 1
