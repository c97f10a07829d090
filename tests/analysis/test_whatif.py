"""`dapo whatif`: without a change it repeats the run to the last bit; what changes is what the equations say."""

import json
import shutil
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow.parquet import read_table

from conformance import naive
from dapo.analysis.whatif import what_if
from dapo.core.errors import ConfigError, DataError
from dapo.policy.model import load_model
from dapo.rewards.examples import digit_share
from dapo.training.train import train
from helpers.async_runs import async_config, run_or_resume
from helpers.commands import run as command
from helpers.run_files import edit_options
from helpers.tiny_runs import metrics, new_run, tiny

OPTIONS = ("data.eval=null", "train.num_steps=2", "reward.workers=1", "optim.lr=0.01")
DIGIT = "dapo.rewards.examples:has_digit"
SHARE = "dapo.rewards.examples:digit_share"
BREVITY = "dapo.rewards.examples:brevity"
RUNS = {
    "binary": ("train.minibatch_groups=4", "train.save_every=1"),
    "graded": (f"reward.verifier={SHARE}", "rollout.prompts_per_step=2"),
    "several": (f"reward.verifier={{{DIGIT}: 1, {SHARE}: 0.3, {BREVITY}: -0.1}}", "advantage.scale=none"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of two steps for each of RUNS, its problems in a file, and one with `schedule: one_step_off`."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"prompt": f"{i}+{i % 7}=", "answer": f"{i + i % 7}", "level": i} for i in range(40)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, options in RUNS.items():
        with new_run(tiny(*OPTIONS, f"data.train={folder / 'problems.jsonl'}", *options), folder / name) as run:
            train(run)
    run_or_resume(folder / "one_step_off", async_config(*OPTIONS))
    run_or_resume(folder / "async", async_config(*OPTIONS, "schedule=async", "max_staleness=4"))
    return {name: folder / name for name in (*RUNS, "one_step_off", "async")}


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()
    return rows


# --- no change


@pytest.mark.parametrize("name", ["binary", "graded", "several", "one_step_off", "async"])
def test_the_same_options_give_everything_again_to_the_last_bit(runs: dict[str, Path], name: str) -> None:
    found = what_if(runs[name], [])
    assert found["judged_again"]
    assert set(found["total"]["changed"].values()) == {0}
    assert all(row["from"] == row["to"] for of in ("outcomes", "verdicts") for row in found[of])
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert found["total"]["responses"] == sum(len(rows_of(runs[name], step)) for step in (1, 2)) >= 16
    for step, logged in zip(found["steps"], metrics(runs[name]), strict=True):
        for side in ("old", "new"):
            assert step[side]["reward_mean"] == logged["reward/mean"]
            assert step[side]["keep_rate"] == logged["rollout/keep_rate"]
            if "reward/accuracy" in logged:
                assert step[side]["accuracy"] == logged["reward/accuracy"]


def test_without_a_change_both_gradients_are_the_one_that_the_run_measured(runs: dict[str, Path]) -> None:
    found = what_if(runs["binary"], [], gradient=True)
    norms = [logged["optim/grad_norm"] for logged in metrics(runs["binary"])]
    assert [(each["step"], each["checkpoint"]) for each in found["gradients"]] == [(1, 0), (2, 1)]
    for each in found["gradients"]:  # one update per step, so the step's gradient is the update's
        assert each["old_norm"] == each["new_norm"] == pytest.approx(norms[each["step"] - 1], rel=1e-6)
        assert each["cosine"] == pytest.approx(1, abs=1e-12)


# --- a change


def test_another_verifier_gives_the_verdicts_that_it_gives(runs: dict[str, Path]) -> None:
    options = [f"reward.verifier={SHARE}", "reward.threshold=0.2", "overlong.mode=off"]
    found = what_if(runs["binary"], options, steps="1")
    expected: Counter[tuple[str, str]] = Counter()
    changed = 0
    for row in rows_of(runs["binary"], 1):
        (score,) = digit_share([row["response"]])
        before, after = ({True: "correct", False: "wrong"}[correct] for correct in (row["correct"], score >= 0.2))
        expected[before, after] += 1
        changed += (row["correct"], row["score"]) != (score >= 0.2, score)
    counted: Counter[tuple[str, str]] = Counter()
    for each in found["verdicts"]:
        counted[each["from"], each["to"].split(",")[0]] += each["responses"]
    assert counted == expected
    assert found["total"]["changed"]["verdicts"] == changed > 0
    for example in found["examples"]["verdicts"]:
        assert example["new_score"] == example["new_reward"] == digit_share([example["response"]])[0]


def test_another_penalty_changes_rewards_and_advantages_as_eq_13_and_9_say(runs: dict[str, Path]) -> None:
    found = what_if(runs["binary"], ["overlong.penalty=3", "overlong.buffer_tokens=8", "advantage.scale=none"])
    assert not found["judged_again"]
    changed = {"rewards": 0, "advantages": 0, "outcomes": 0, "verdicts": 0, "advantage_signs": 0}
    for step in (1, 2):
        for _, members in groupby(rows_of(runs["binary"], step), key=lambda row: row["group_id"]):
            group = list(members)
            rewards = [row["score"] - 3 * row["response_tokens"] / 8 for row in group]
            mean = sum(rewards) / len(rewards)
            changed["rewards"] += sum(abs(new - row["reward"]) > 1e-9 for new, row in zip(rewards, group, strict=True))
            if group[0]["outcome"] == "trained":
                pairs = [(reward - mean, row["advantage"]) for reward, row in zip(rewards, group, strict=True)]
                changed["advantages"] += sum(abs(new - old) > 1e-9 for new, old in pairs)
                changed["advantage_signs"] += sum(new * old < 0 for new, old in pairs)
    assert found["total"]["changed"] == changed
    assert changed["advantages"] > 0


def test_a_filter_and_thresholds_decide_anew_and_a_full_batch_ends_the_step(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_filters_of_whatif.py").write_text(
        "def every(group):\n    return True\n\ndef known(group):\n    return group.problem.fields['level'] % 2 == 0"
        " and len(group.prompt_ids) > 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    every = what_if(runs["binary"], ["dynamic_sampling.filter=my_filters_of_whatif:every"])
    for step in every["steps"]:
        assert (step["new"]["groups"], step["new"]["kept"], step["shortfall_groups"]) == (4, 4, 0)
    known = what_if(runs["binary"], ["dynamic_sampling.filter=my_filters_of_whatif:known"], steps="1:1")["steps"][0]
    levels = [json.loads(row["fields"])["level"] for row in rows_of(runs["binary"], 1)[::4]]
    even = sum(level % 2 == 0 for level in levels)
    assert known["new"]["kept"] == min(even, 4)
    assert known["shortfall_groups"] == max(0, 4 - even)
    spread = what_if(runs["graded"], ["dynamic_sampling.filter={min_spread: 0.2}"])
    for step in spread["steps"]:
        scores = [row["score"] for row in rows_of(runs["graded"], step["step"])]
        wide = sum(max(scores[i : i + 4]) - min(scores[i : i + 4]) >= 0.2 for i in range(0, len(scores), 4))
        assert step["new"]["kept"] == min(2, wide)


def test_a_preset_sets_what_it_stands_for_and_gradients_are_those_of_the_equations(runs: dict[str, Path]) -> None:
    found = what_if(runs["binary"], ["preset=grpo", "loss.kl_coef=0"], gradient=True, steps="1")
    assert {each["name"]: each["new"] for each in found["options"]} == {
        "preset": "grpo",
        "dynamic_sampling.enabled": False,
        "overlong.mode": "off",
        "loss.clip_high": 0.2,
        "loss.aggregate": "sequence",
    }
    groups = [list(of) for _, of in groupby(rows_of(runs["binary"], 1), key=lambda row: row["group_id"])]
    dapo = [([row["reward"] for row in group], group) for group in groups if group[0]["outcome"] == "trained"]
    grpo = [([row["score"] for row in group], group) for group in groups[:4]]
    first, second = naive_gradient(dapo, by_response=False), naive_gradient(grpo, by_response=True)
    (compared,) = found["gradients"]
    assert compared["old_norm"] == pytest.approx(first.norm().item(), rel=1e-5)
    assert compared["new_norm"] == pytest.approx(second.norm().item(), rel=1e-5)
    assert compared["cosine"] == pytest.approx((first @ second / first.norm() / second.norm()).item(), abs=1e-5)
    assert compared["cosine"] < 0.999


def naive_gradient(groups: list[tuple[list[float], list[dict[str, Any]]]], *, by_response: bool) -> torch.Tensor:
    """Minus the gradient of Eq. 8 (Eq. 5 by response) at the initial model, where every ratio is 1."""
    loaded = load_model("tiny-random", dtype=torch.float64)
    lengths = [row["response_tokens"] for _, group in groups for row in group]
    loss = torch.zeros((), dtype=torch.float64)
    for rewards, group in groups:
        for advantage, row in zip(naive.group_advantages(rewards, "std"), group, strict=True):
            prompt = loaded.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            ids = torch.tensor([prompt + row["response_ids"]])
            logits = loaded.model(ids).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, dim=-1)[range(len(row["response_ids"])), row["response_ids"]]
            weight = 1 / (len(lengths) * len(logprobs)) if by_response else 1 / sum(lengths)
            loss = loss - weight * advantage * logprobs.sum()
    gradients = torch.autograd.grad(loss, list(loaded.model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


# --- what cannot be done, and what is gone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rollout.temperature=0.5"], "rollout.temperature does not act between sampling and the update"),
        (["model=smollm2-135m-instruct"], "model does not act"),
        (["rollout.group_size=4"], "rollout.group_size does not act"),
        (["dynamic_sampling.max_groups_per_step=9"], "dynamic_sampling.max_groups_per_step does not act"),
        (["loss.clip_high=0.5"], "add --gradient"),
        (["reward.verifer=math"], "did you mean reward.verifier"),
        (["overlong.buffer_tokens=99"], "must not exceed"),
    ],
)
def test_an_option_that_cannot_be_changed_afterwards_is_refused(
    runs: dict[str, Path], options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        what_if(runs["binary"], options)


def test_steps_that_are_gone_are_named(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["binary"], run)
    (run / "rollouts/step_000001.parquet").unlink()
    found = what_if(run, ["overlong.penalty=2"])
    assert (found["missing_steps"], [step["step"] for step in found["steps"]]) == ([1], [2])
    assert any("log.rollouts" in note for note in found["notes"])
    with pytest.raises(DataError, match="no judged responses of steps 1; stored: steps 2 to 2"):
        what_if(run, ["overlong.penalty=2"], steps="1")
    with pytest.raises(ConfigError, match="expected A:B"):
        what_if(run, [], steps="one")
    (run / "rollouts/step_000002.parquet").unlink()
    with pytest.raises(DataError, match="no judged responses of any step; stored: none"):
        what_if(run, ["overlong.penalty=2"])


def test_where_the_data_is_gone_the_columns_of_the_table_stand_in_for_it(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["binary"], run)
    edit_options(run, "problems.jsonl", "gone.jsonl")
    found = what_if(run, [], steps="1")
    assert set(found["total"]["changed"].values()) == {0}
    assert any("data is gone" in note and "gone.jsonl" in note for note in found["notes"])


def test_verifier_errors_are_counted_and_end_nothing(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards_of_whatif.py").write_text(
        "def odd(completions, level, **columns):\n    if level[0] % 2:\n        raise ValueError('odd level')\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    found = what_if(runs["binary"], ["reward.verifier=my_rewards_of_whatif:odd"])
    rows = [row for step in (1, 2) for row in rows_of(runs["binary"], step)]
    odd = sum(json.loads(row["fields"])["level"] % 2 for row in rows)
    assert found["total"]["new"]["verifier_errors"] == odd > 0
    assert found["errors"]["new"][0]["responses"] == odd
    assert "odd level" in found["errors"]["new"][0]["error"]
    assert sum(row["responses"] for row in found["verdicts"] if row["to"] == "no verdict") == odd


def test_a_verifier_that_gives_only_scores_has_no_accuracy(runs: dict[str, Path]) -> None:
    found = what_if(runs["binary"], [f"reward.verifier={SHARE}"], steps="1")
    assert found["total"]["old"]["accuracy"] is not None
    assert found["total"]["new"]["accuracy"] is None


def test_the_command_prints_for_a_person_and_as_one_json_object(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["whatif", str(runs["binary"]), "dynamic_sampling.enabled=false", "--gradient"]
    code, out, err = command(capsys, *arguments, "--json")
    assert (code, len(out.splitlines()), err) == (0, 1, "")
    found = json.loads(out)
    code, out, _ = command(capsys, *arguments)
    assert code == 0
    assert "dynamic_sampling.enabled: true -> false" in out
    for each in found["gradients"]:
        assert f"{each['cosine']:.6f}" in out
    for row in found["outcomes"]:
        assert row["from"] in out
    code, _, err = command(capsys, "whatif", str(runs["binary"]), "rollout.temperature=2")
    assert (code, "does not act between sampling and the update" in err) == (2, True)
