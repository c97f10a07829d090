"""An evaluation whose responses have no verdict says so on the console, with the reason."""

import json
from pathlib import Path

import pytest

from helpers.commands import run


def test_the_console_tells_why_responses_of_an_evaluation_have_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name, answer in (("train", "5"), ("eval", "held out")):
        rows = [{"prompt": f"{name} {number}", "answer": answer} for number in range(6)]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    options = [
        f"data={{train: {tmp_path}/train.jsonl, eval: {tmp_path}/eval.jsonl}}",
        "reward={verifier: 'helpers.faulty_rewards:fails_on_held_out', workers: 1}",
        "dynamic_sampling.enabled=false",
        "train.num_steps=1",
        "train.threads=1",
    ]
    code, out, err = run(capsys, "train", "tiny", "--run-dir", str(tmp_path / "run"), *options)
    assert code == 0, out + err
    told = "6 of 6 responses have no verdict (100.0%)"
    reason = "the most frequent error: helpers.faulty_rewards:fails_on_held_out raised ValueError"
    shown = " ".join((out + err).split())
    assert shown.count(f"evaluation: {told}") == 2
    assert reason in shown
