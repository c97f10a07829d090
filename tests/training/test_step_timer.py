"""`profile.steps` writes a trace, prints where the time went, and changes nothing that is
computed.
"""

import gzip
import json
import re
from pathlib import Path

import pytest

from dapo.cli.train import start_run
from helpers.tiny_runs import contents, differences, tiny

OPTIONS = ("train.num_steps=2", "train.eval_every=0")


def test_the_asked_steps_are_traced_and_nothing_else_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plain = tmp_path / "plain"
    traced = tmp_path / "traced"
    start_run(tiny(*OPTIONS), run_dir=plain, config_name="t")
    start_run(tiny(*OPTIONS, "profile.steps=2"), run_dir=traced, config_name="t")
    assert differences(contents(traced), contents(plain)) == []

    assert [path.name for path in (traced / "profile").iterdir()] == ["step_000002.json.gz"]
    with gzip.open(traced / "profile" / "step_000002.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"phase: generate", "phase: update"} <= names
    assert names & {"aten::mm", "mkldnn::_linear_pointwise"}  # by processor (cpu_kernels.linear)

    printed = capsys.readouterr().out
    assert "trace of step 2: " in printed
    table = printed[printed.index("phase, operation") :]
    seconds = {
        name: float(value)
        for name, value in re.findall(r"^(\w+) +([0-9.]+)$", table, flags=re.MULTILINE)
    }
    row = json.loads((traced / "metrics.jsonl").read_text().splitlines()[2])
    for phase in ("generate", "old_logprobs", "update"):
        assert seconds[phase] == pytest.approx(row[f"time/{phase}_s"], abs=0.05)
