"""`dapo ablate` as it is typed: whole runs of the tiny model, the table, and what is made of stored
results.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dapo.analysis.ablate.experiment import load_experiment, shipped_ladders
from dapo.analysis.ablate.results import Results, collect, write_results
from dapo.analysis.ablate.runner import RunProgress, run_experiment
from dapo.analysis.ablate.table import make_table
from dapo.cli.ablate import parse_seeds
from dapo.core.errors import ConfigError
from dapo.training.signals import StopRequest
from helpers.ablations import FakeCommand, write_run
from helpers.commands import run
from helpers.fork_server import ForkServer
from helpers.paths import TINY

FILE = """
base: {base}
seeds: [0]
set: [train.num_steps=2, train.eval_every=1, log.rollouts=none, train.token_budget=100000]
variants: {{GRPO: [preset=grpo], DAPO: [preset=dapo]}}
"""


class Quiet:
    """A display that shows nothing."""

    def update(self, progress: RunProgress) -> None: ...

    def message(self, text: str) -> None: ...


def test_two_rows_of_the_tiny_model_begin_alike_and_end_in_a_table(
    tmp_path: Path, fork_server: ForkServer
):
    (tmp_path / "mine.yaml").write_text(FILE.format(base=TINY))
    experiment = load_experiment(tmp_path / "mine.yaml", ["train.threads=1"])

    def start(arguments: Sequence[str], log: Path) -> FakeCommand:
        return FakeCommand(
            arguments, polls=0, finish=lambda given: fork_server.run(*given, output=log)[0]
        )

    failures = run_experiment(
        experiment, tmp_path / "x", jobs=1, stop=StopRequest(), display=Quiet(), start=start
    )
    assert failures == {}
    results = collect(experiment, tmp_path / "x")
    first, second = results.facts["runs"]
    assert (first["state"], second["state"]) == ("finished", "finished")
    assert first["accuracy_before"] == second["accuracy_before"]
    assert (first["steps"], first["tokens"]) == (
        2,
        sum(_tokens(tmp_path / "x" / "runs" / "GRPO-seed0")),
    )
    (table,) = make_table(results)
    assert table["notes"] == []
    difference = table["rows"][1]["to_baseline"]
    assert difference["mean"] == pytest.approx(second["accuracy"] - first["accuracy"])
    assert (difference["seeds"], difference["problems"]) == (1, 8)
    assert first["curve"]["step"] == second["curve"]["step"] == [0, 1, 2]
    assert None not in first["curve"]["accuracy"] + second["curve"]["accuracy"]


def _tokens(path: Path) -> list[int]:
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [row.get("rollout/tokens_generated", 0) for row in rows]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Results of two rows and two seeds, without runs."""
    (tmp_path / "mine.yaml").write_text(
        "{base: tiny, seeds: [0, 1], variants: {a: [], b: {inherits: a, set: []}}}"
    )
    experiment = load_experiment(tmp_path / "mine.yaml")
    for planned in experiment.runs():
        path = tmp_path / "x" / "runs" / planned.name
        accuracy = 0.9 if planned.variant == "b" else 0.2
        write_run(
            ["train", str(TINY), *planned.overrides, "--run-dir", str(path)], accuracy=accuracy
        )
    results = collect(experiment, tmp_path / "x")
    write_results(results, make_table(results), tmp_path / "kept")
    return tmp_path / "kept"


def test_a_report_needs_nothing_but_the_stored_results(
    capsys: pytest.CaptureFixture[str], stored: Path
):
    code, out, _ = run(capsys, "ablate", "--report", str(stored))
    assert code == 0
    assert "avg@4, 6 held-out problems, 2 seeds" in out
    assert "Intervals are over seeds and problems, of one seed over problems alone;" in out
    (row,) = [line for line in out.splitlines() if line.strip().startswith("b ") and "[" in line]
    assert "+70.0 [" in row
    assert row.rstrip().endswith("*")
    assert (stored / "curves.png").is_file()
    before = json.loads((stored / "results.json").read_text())
    code, out, _ = run(
        capsys, "ablate", "--report", str(stored), "--output", str(stored / "again"), "--json"
    )
    found: dict[str, Any] = json.loads(out)
    assert found["table"] == before["table"]
    assert json.loads((stored / "again" / "results.json").read_text()) == before
    assert found["pictures"] == [
        str(stored / "again" / name) for name in ("curves.png", "differences.png")
    ]


def test_seeds_of_two_machines_are_put_together(
    capsys: pytest.CaptureFixture[str], stored: Path, tmp_path: Path
):
    facts = json.loads((stored / "results.json").read_text())
    for seed in facts["experiment"]["seeds"]:
        part = {**facts, "experiment": {**facts["experiment"], "seeds": [seed]}}
        part["runs"] = [run for run in facts["runs"] if run["seed"] == seed]
        write_results(Results(part), [], tmp_path / f"part{seed}")
    parts = [
        argument
        for seed in facts["experiment"]["seeds"]
        for argument in ("--report", str(tmp_path / f"part{seed}"))
    ]
    code, out, _ = run(capsys, "ablate", *parts, "--output", str(tmp_path / "all"), "--json")
    assert code == 0
    assert json.loads(out)["table"] == facts["table"]
    assert json.loads((tmp_path / "all" / "results.json").read_text()) == facts


def test_a_plan_lists_rows_changes_and_options_without_effect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    code, out, _ = run(
        capsys, "ablate", str(TINY), "train.minibatch_groups=4", "--dry-run", "--seeds", "3-4"
    )
    assert code == 0
    assert "tiny-table1: 12 runs of" in out
    assert "  + clip-higher: loss.clip_high 0.2 -> 0.28  (from + overlong filtering)" in out
    assert (
        "note: + clip-higher: an option without effect: loss.clip_high: needs several updates per"
        " step" in out
    )
    code, out, _ = run(
        capsys, "ablate", str(TINY), "--dry-run", "--json", "--folder", str(tmp_path / "f")
    )
    found = json.loads(out)
    assert len(found["runs"]) == 30
    assert found["variants"][1] == {
        "name": "+ overlong filtering",
        "inherits": "naive GRPO",
        "set": ["overlong.mode=filter"],
        "previous": "naive GRPO",
    }
    assert not (tmp_path / "f").exists()


def test_a_row_of_its_own_is_shown_by_its_difference_to_the_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    third = "{inherits: two, set: [loss.clip_low=0.1]}"
    rows = f"{{one: [advantage.scale=none], two: [loss.max_approx_kl=null], three: {third}}}"
    (tmp_path / "rows.yaml").write_text(f"base: {TINY}\nvariants: {rows}\n")
    code, out, _ = run(capsys, "ablate", str(tmp_path / "rows.yaml"), "--dry-run")
    assert code == 0
    assert "  one: advantage.scale std -> none  (from tiny.yaml)\n" in out
    assert "  two: loss.max_approx_kl 10.0 -> null  (from tiny.yaml)\n" in out
    assert "  three: loss.clip_low 0.2 -> 0.1  (from two)\n" in out


def test_a_ladder_is_shown_as_it_stands_and_faults_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    for name, path in shipped_ladders().items():
        assert run(capsys, "ablate", "--show", name) == (0, path.read_text(), "")
    for arguments, message in (
        (("ablate",), "takes an experiment file or a configuration"),
        (("ablate", "--show", "table2"), "no ladder 'table2'; did you mean table1?"),
        (("ablate", "--report", str(tmp_path)), "cannot read"),
        (("ablate", "tiny", "--seeds", "a"), "--seeds a: expected seeds such as 0,1,2 or 100-104"),
        (
            ("ablate", "tiny", "optim.lrr=1", "--dry-run"),
            "unknown option optim.lrr; did you mean optim.lr=1?",
        ),
        (
            ("ablate", "tiny", "train.seed=1", "--dry-run"),
            "train.seed cannot be set here: give --seeds",
        ),
        (("ablate", "--report", str(tmp_path), "tiny"), "give a folder, and no configuration"),
        (
            ("ablate", "--report", str(tmp_path), "--report", str(tmp_path)),
            "add --output FOLDER for it",
        ),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2
        assert message in err.replace("\n", " ")


def test_seeds_are_a_list_of_numbers_and_ranges():
    assert parse_seeds("0,1, 5") == [0, 1, 5]
    assert parse_seeds("100-102,7") == [100, 101, 102, 7]
    for text in ("", "3-1", "x", "1-", "0-999999999"):
        with pytest.raises(ConfigError, match="expected seeds such as"):
            parse_seeds(text)
