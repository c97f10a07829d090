"""Whole runs of episodes: metrics and tables, equal bytes however slow an environment is,
resumption, evaluations.
"""

import json
import linecache
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table

import dapo
from dapo.cli.train import resume_run, start_run
from dapo.config import Config, dump_config
from dapo.core.errors import ConfigError
from dapo.environments import StepResult
from dapo.runs.rollout_table import EPISODE, all_columns, read_rollouts
from helpers.commands import run as run_command
from helpers.tiny_runs import contents, differences, metrics, tiny

pytestmark = pytest.mark.usefixtures("forked_workers")

# the random model ends few turns by itself, so that episodes have up to three within 64 tokens
EPISODES = (
    "environment=helpers.environments:Digits",
    "environment.max_observation_tokens=24",
    "rollout.max_response_tokens=64",
    "reward.verifier=auto",
)
ONE_STEP = ("train.num_steps=1", "data.eval=null", "train.eval_every=0", "train.save_every=0")
SHORT = ("train.num_steps=2", "data.eval=null", "train.eval_every=0", "train.save_every=2")


def episodes(*options: str) -> Config:
    return tiny(*EPISODES, *options)


def trained(path: Path, *options: str) -> Path:
    start_run(episodes(*options), run_dir=path, config_name="t")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint after each, and an evaluation of its last one."""
    options = ("train.num_steps=3", "train.eval_every=3", "train.save_every=1")
    options += ("train.keep_checkpoints=9",)
    return trained(tmp_path_factory.mktemp("episodes") / "whole", *options)


def resumed(whole: Path, run: Path, *, step: int) -> Path:
    """A copy of `whole` as it was when step `step` was saved, continued to its end."""
    shutil.copytree(whole, run)
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    resume_run(run, [])
    return run


def table(run: Path) -> list[dict[str, Any]]:
    """All that a run stores of its responses but the log-probabilities of its engine."""
    paths = sorted((run / "rollouts").iterdir())
    return read_rollouts(
        paths, [name for name in all_columns(*paths) if name != "engine_logprobs"]
    ).to_pylist()


def test_metrics_and_tables_count_turns_rewards_and_observed_tokens(whole: Path):
    rows = [{**row, "episode": json.loads(row["episode"])} for row in table(whole)]
    assert {len(row["episode"]["rewards"]) for row in rows} >= {1, 2}
    for row in rows:
        turns = [each for each in row["episode"]["messages"] if each["role"] == "assistant"]
        ranges = row["sampled"] or [0, len(row["response_ids"])]
        assert len(turns) == len(row["episode"]["rewards"]) == len(ranges) // 2
        assert row["response_tokens"] == sum(ranges[1::2]) - sum(ranges[::2]) <= 64
        assert row["score"] == sum(row["episode"]["rewards"])
        assert row["correct"] is row["episode"]["correct"]
        assert row["episode"]["rewards"][:-1] == [0.25] * (len(turns) - 1)
        assert all(
            f"[user] {each['content']}" in row["response"]
            for each in row["episode"]["messages"][1::2]
        )
    for step, row in enumerate(metrics(whole)[1:], start=1):
        stored = [
            each
            for each in rows
            if each["step"] == step and each["outcome"] not in ("excess", "aborted")
        ]
        observed = sum(len(each["response_ids"]) - each["response_tokens"] for each in stored)
        assert row["rollout/observation_tokens"] == observed
        assert row["rollout/turns_mean"] == sum(
            len(each["episode"]["rewards"]) for each in stored
        ) / len(stored)
        assert row["rollout/episodes_cut_fraction"] == sum(
            r["episode"]["is_cut"] for r in stored
        ) / len(stored)
        undecided = row["rollout/tokens_excess"] + row["rollout/tokens_aborted"]
        assert row["rollout/tokens_generated"] - undecided == sum(
            each["response_tokens"] for each in stored
        )
        assert row["rollout/environment_errors"] == row["rollout/tool_calls"] == 0


def test_an_evaluation_keeps_the_conversation(whole: Path):
    evaluation = json.loads((whole / "eval/step_000003.json").read_text())
    responses = [each["responses"][0] for each in evaluation["table"]]
    assert any("\n[user] turn " in each["text"] for each in responses)
    assert all(each["correct"] in (True, False) for each in responses)


def test_an_environment_that_ends_after_the_first_turn_gives_the_bytes_of_a_run_without_one(
    tmp_path: Path,
):
    short = trained(tmp_path / "episodes", "environment.name=helpers.environments:Short", *SHORT)
    options = (
        *EPISODES[2:],
        "environment=null",
        "reward.verifier=helpers.environments:is_short",
        *SHORT,
    )
    start_run(tiny(*options), run_dir=tmp_path / "responses", config_name="t")
    found, expected = (contents(run)["files"] for run in (short, tmp_path / "responses"))
    assert {row["correct"] for row in table(short)} == {True, False}
    for name in ("rollouts/step_000001.parquet", "rollouts/step_000002.parquet"):
        without, other = (read_table(run / name) for run in (short, tmp_path / "responses"))
        assert without.drop_columns([EPISODE.name]).equals(other)
        del found[name], expected[name]
    assert [name for name in expected if found[name] != expected[name]] == []
    assert any(name.startswith("checkpoints/step_000002/weights") for name in expected)


def test_neither_workers_nor_their_delays_and_deaths_change_a_byte(tmp_path: Path):
    expected = contents(trained(tmp_path / "a", "environment.workers=1", *SHORT))
    to_die = tmp_path / "to_die"
    to_die.touch()
    slow = f"environment.options={{delay_s: 0.05, to_die: {to_die}}}"
    assert (
        differences(
            contents(trained(tmp_path / "b", "environment.workers=3", slow, *SHORT)), expected
        )
        == []
    )
    assert not to_die.exists()


def test_the_lag_of_an_answer_changes_nothing_that_trains(tmp_path: Path):
    """It changes which responses the engine computes at once, and so how their log-probabilities
    are rounded.
    """
    runs = [
        trained(
            tmp_path / lag, f"environment.lag_polls={lag}", "dynamic_sampling.enabled=false", *SHORT
        )
        for lag in ("1", "5")
    ]
    one, five = (contents(run, checkpoints="step_000002")["files"] for run in runs)
    weights = [name for name in one if name.startswith("checkpoints/")]
    assert [one[name] == five[name] for name in weights] == [True] * len(weights) != []
    assert table(runs[0]) == table(runs[1])


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_byte(whole: Path, tmp_path: Path):
    assert differences(contents(resumed(whole, tmp_path / "run", step=1)), contents(whole)) == []


def test_one_step_off_with_two_engines_resumes_to_the_byte(tmp_path: Path):
    options = (
        "schedule=one_step_off",
        "rollout.engines=2",
        "train.num_steps=3",
        "train.keep_checkpoints=9",
    )
    whole = trained(tmp_path / "whole", *options, "train.save_every=1", "train.eval_every=0")
    assert max(row["rollout/turns_mean"] for row in metrics(whole)[1:]) > 1
    assert differences(contents(resumed(whole, tmp_path / "run", step=2)), contents(whole)) == []


def test_async_episodes_go_on_across_closes_and_resume_to_the_byte(tmp_path: Path):
    options = (
        "schedule=async",
        "max_staleness=4",
        "rollout.engines=2",
        "train.num_steps=4",
        "train.save_every=1",
    )
    whole = trained(tmp_path / "whole", *options, "train.keep_checkpoints=9", "train.eval_every=0")
    kept = [
        json.loads(path.read_text())
        for path in sorted(whole.glob("checkpoints/*/kept_groups.json"))
    ]
    waiting = [
        lag for each in kept for group in each["groups"] for lag in group["lags"] if lag is not None
    ]
    assert len(kept) == 2
    assert waiting  # for their environment, which is not asked again
    rows = [
        row
        for path in sorted((whole / "rollouts").iterdir())
        for row in read_table(path).to_pylist()
    ]
    assert any(row.get("versions") and row["sampled"] for row in rows)
    assert max(row["rollout/staleness_max"] for row in metrics(whole)[1:]) > 1
    assert differences(contents(resumed(whole, tmp_path / "run", step=2)), contents(whole)) == []


@pytest.mark.parametrize(
    "schedule", [("schedule=sync",), ("schedule=async", "max_staleness=3", "rollout.engines=1")]
)
def test_a_run_whose_answers_count_when_they_arrive_trains_and_resumes(
    tmp_path: Path, schedule: tuple[str, ...]
):
    """Each answer takes a random time of its own, so that neither two runs nor a run and its
    resumption are equal.
    """
    options = (
        "rollout.clock=load",
        "environment.options={delay_s: 0.02}",
        "train.num_steps=2",
        "train.save_every=1",
    )
    whole = trained(tmp_path / "whole", *schedule, *options, "train.keep_checkpoints=9")
    for run in (whole, resumed(whole, tmp_path / "run", step=1)):
        rows = metrics(run)
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert all(row["rollout/turns_mean"] > 1 for row in rows[1:])
        assert sum(row["rollout/groups_invalid"] for row in rows[1:]) == 0


def test_an_environment_that_always_raises_is_refused_with_its_reason_before_a_run_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    name = "helpers.environments:Broken"
    with pytest.raises(ConfigError) as failed:
        trained(tmp_path / "run", f"environment.name={name}", *SHORT)
    reason = "raised ConnectionError: the game server is down"
    assert reason in str(failed.value)
    assert f"dapo test {name}" in str(failed.value)
    assert not (tmp_path / "run").exists()
    capsys.readouterr()
    code, out, _ = run_command(capsys, "test", name, "--json")
    assert code == 1
    assert all(reason in each["error"] for each in json.loads(out)["episodes"])


def test_output_and_seconds_of_an_environment_are_kept(tmp_path: Path):
    run = trained(tmp_path / "run", "environment.name=helpers.environments:Loud", *ONE_STEP)
    assert "a turn is played\n" in (run / "logs" / "verifier.log").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["time/environment_s"] > 0 for row in rows if row["step"])


def test_a_probe_samples_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "my.yaml").write_text(dump_config(episodes(*SHORT)))
    code, out, err = run_command(capsys, "check", str(tmp_path / "my.yaml"), "--probe", "--json")
    assert code == 0, err
    probe = json.loads(out)["probe"]
    assert probe["verifier_errors"] == 0
    assert 0 < probe["accuracy"] < 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("preset=ppo", "critic.lr=0.01"), id="PPO"),
        pytest.param(("model.lora={rank: 2, alpha: 4}", "loss.kl_coef=0.1"), id="LoRA"),
        pytest.param(
            ("preset=rloo", "loss.kl_coef=0.5", "loss.kl_in=reward"), id="divergence in the reward"
        ),
    ],
)
def test_observed_tokens_train_in_no_method(tmp_path: Path, options: tuple[str, ...]):
    run = trained(tmp_path / "run", *options, "optim.warmup_steps=0", *SHORT)
    rows = metrics(run)[1:]
    assert sum(row["rollout/observation_tokens"] for row in rows) > 0
    for row in rows:
        assert (
            row["optim/update_tokens"]
            == row["rollout/tokens_trained"]
            <= row["rollout/tokens_generated"]
        )
        assert row["optim/grad_norm"] > 0


def test_eval_plays_episodes_and_a_server_is_refused(
    whole: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = (
        "eval",
        str(whole),
        "--json",
        "--samples-per-problem",
        "4",
        "--output",
        str(whole / "judged.json"),
    )
    code, out, err = run_command(capsys, *arguments)
    assert code == 0, err
    assert json.loads(out)["verifier"] == "environment"
    assert "\\n[user] turn " in (whole / "judged.json").read_text()
    code, _, err = run_command(capsys, "eval", str(whole), "--server", "http://127.0.0.1:1/v1")
    assert (code, "this run plays episodes: evaluate it without a server" in err) == (2, True)


def test_explain_walks_the_longest_episode_of_a_group(
    whole: Path, capsys: pytest.CaptureFixture[str]
):
    rows = table(whole)
    longest = max(
        (row for row in rows if row["outcome"] == "trained"),
        key=lambda row: len(row["sampled"] or ()),
    )
    step = str(longest["step"])
    group = str(longest["group_id"])
    code, out, err = run_command(
        capsys, "explain", str(whole), "--step", step, "--group", group, "--json"
    )
    assert code == 0, err
    found = json.loads(out)["responses"][longest["sample"]]
    episode = json.loads(longest["episode"])
    turns = found["turns"]
    assert [(each["role"], each["text"]) for each in turns] == [
        tuple(each.values()) for each in episode["messages"]
    ]
    assert [each["reward"] for each in turns] == [
        r for reward in episode["rewards"] for r in (reward, None)
    ][:-1]
    spans = [each["tokens"] for each in turns if each["tokens"] is not None]
    assert [end for span in spans for end in span] == longest["sampled"]
    observed = [
        i for i in range(len(longest["response_ids"])) if not any(a <= i < b for a, b in spans)
    ]
    assert len(observed) > 0
    assert found["observed_tokens"] == len(observed)
    code, out, _ = run_command(
        capsys, "explain", str(whole), "--step", step, "--group", group, "--equations"
    )
    assert code == 0
    assert "observed" in out
    assert "only the tokens of the assistant's turns train" in out


def test_explain_says_what_the_tokens_of_a_turn_are_credited_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ("environment.credit=turn", "dynamic_sampling.enabled=false", *ONE_STEP)
    run = trained(tmp_path / "run", *options)
    group = min(
        row["group_id"] for row in table(run) if (row["step"], row["outcome"]) == (1, "trained")
    )
    capsys.readouterr()  # what training printed
    code, out, err = run_command(
        capsys, "explain", str(run), "--step", "1", "--group", str(group), "--json"
    )
    assert code == 0, err
    assert json.loads(out)["eq9"]["credit"] == "turn"
    code, out, _ = run_command(
        capsys, "explain", str(run), "--step", "1", "--group", str(group), "--equations"
    )
    assert (
        code,
        "the tokens of a turn have the advantage of the rewards" in " ".join(out.split()),
    ) == (0, True)


def test_the_doctor_finds_tools_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ("environment.name=helpers.environments:BrokenTool", "environment.max_turns=2")
    run = trained(
        tmp_path / "run",
        *options,
        *SHORT,
        "train.num_steps=3",
        "dynamic_sampling.enabled=false",
    )
    assert all(
        0 < row["rollout/tool_errors"] <= row["rollout/tool_calls"] for row in metrics(run)[1:]
    )
    capsys.readouterr()
    code, out, _ = run_command(capsys, "doctor", str(run), "--json")
    findings = {each["name"]: each for each in json.loads(out)["findings"]}
    assert code == 0
    assert findings["tool_errors"]["holds"]
    assert "verifier_errors" not in findings


def test_a_session_collects_episodes_of_a_class_of_a_cell():
    namespace: dict[str, Any] = {"StepResult": StepResult, "__name__": "__main__"}
    linecache.cache["<cell>"] = (len(CELL), None, CELL.splitlines(keepends=True), "<cell>")
    exec(compile(CELL, "<cell>", "exec"), namespace)
    options: dict[str, Any] = {"prompts_per_step": 2, "group_size": 4, "max_response_tokens": 48}
    with dapo.session(
        "tiny-random", data="environment", environment=namespace["Parity"], **options
    ) as session:
        batch = session.collect()
    rewards = {reward for group in batch.groups for reward in group.rewards}
    assert len(rewards) > 1
    assert all(reward is None or reward <= 8 for reward in rewards)


CELL = """
class Parity:
    def reset(self, problem, seed):
        return "Say something."
    def step(self, action):
        return StepResult("more", reward=float(len(action) % 2))
"""
