"""A fork begins as its parent to the byte, draws as it does, and neither run can change the
other.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dapo.cli.train import resume_run
from dapo.config import load_config
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.loading import CODE_FOLDERS
from dapo.data.problems import load_problems
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import Fork
from dapo.runs.status import run_status
from dapo.start.fork import create_fork, plan_fork
from helpers.async_runs import async_config, run_or_resume
from helpers.commands import run as run_command
from helpers.commands import run_script
from helpers.finished_runs import SAVES
from helpers.tables import for_each_row
from helpers.tiny_runs import EVENTFUL, contents, differences, metrics

STEP = 2


@pytest.fixture
def parent(sync_run: Path) -> Path:
    return sync_run


@pytest.fixture
def async_parent(async_run: Path) -> Path:
    return async_run


def fork_of(
    parent: Path, path: Path, *overrides: str, step: int = STEP, branch: int | None = None
) -> Path:
    """A fork that is not trained yet."""
    return create_fork(
        plan_fork(RunDirectory(parent), step, overrides, branch=branch), path, ["dapo", "fork"]
    ).path


def trained_async(run: Path) -> Path:
    run_or_resume(run, load_config(run / "config.yaml"))
    return run


def responses(run: Path, step: int) -> dict[tuple[int, int], list[int]]:
    """The tokens of a step's responses, by position in the stream and index in the group."""
    table = pq.read_table(run / f"rollouts/step_{step:06d}.parquet")
    rows = table.select(["group_id", "sample", "response_ids"]).to_pylist()
    return {(row["group_id"], row["sample"]): row["response_ids"] for row in rows}


def snapshot(run: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a run with its content and the time of its last change."""
    files = [path for path in run.rglob("*") if path.is_file()]
    return {
        path.relative_to(run).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in files
    }


def equal_to_parent(fork: Path, parent: Path, *, step: int = STEP) -> list[str]:
    """What of a trained fork is not equal to its parent's; checkpoints before the fork are the
    parent's alone.
    """
    found = contents(fork)
    expected = contents(parent)
    for number in range(1, step):
        expected["states"].pop(f"step_{number:06d}")
        names = [
            name for name in expected["files"] if name.startswith(f"checkpoints/step_{number:06d}/")
        ]
        for name in names:
            del expected["files"][name]
    return differences(found, expected)


def test_with_adapters_and_predictions_it_is_its_parent_to_the_byte_too(
    lora_run: Path, tmp_path: Path
):
    fork = fork_of(lora_run, tmp_path / "fork")
    resume_run(fork, [])
    assert equal_to_parent(fork, lora_run) == []


def test_one_step_off_it_takes_the_prefetched_batch_and_is_its_parent_to_the_byte(
    async_parent: Path, tmp_path: Path
):
    fork = trained_async(fork_of(async_parent, tmp_path / "fork"))
    assert equal_to_parent(fork, async_parent) == []


def test_async_it_takes_the_kept_groups_or_begins_them_again_under_another_seed(tmp_path: Path):
    parent = tmp_path / "run"
    more = ("schedule=async", "max_staleness=3", "rollout.max_response_tokens=24")
    run_or_resume(parent, async_config(*EVENTFUL, *SAVES, *more))
    assert (parent / f"checkpoints/step_{STEP:06d}/kept_groups.json").exists()
    fork = trained_async(fork_of(parent, tmp_path / "fork"))
    assert equal_to_parent(fork, parent) == []
    seed = trained_async(fork_of(parent, tmp_path / "seed", branch=1))
    first = min(position for position, _ in responses(seed, STEP + 1))
    assert first == 1 + max(position for position, _ in decided(parent, STEP))


def test_another_learning_rate_gets_the_same_draws_and_changes_no_file_of_the_parent(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = snapshot(parent)
    fork = fork_of(
        parent,
        tmp_path / "fork",
        "optim.lr=0.05",
        "log.rollouts=last:2",
        "train.keep_checkpoints=1",
    )
    shared = {
        path.relative_to(fork).parts[0]
        for path in fork.rglob("*")
        if path.is_file() and path.stat().st_nlink > 1
    }
    assert shared == {"rollouts", "eval", "checkpoints"}, "only what is never written again"
    assert not [path for path in fork.rglob("*") if path.is_symlink()]
    resume_run(fork, [])
    assert "warning" not in capsys.readouterr().out, "a change that was asked for is none"
    # the first step after the fork is sampled from the same weights
    assert responses(fork, STEP + 1) == responses(parent, STEP + 1)
    assert responses(fork, STEP + 2) != responses(parent, STEP + 2)
    assert metrics(fork)[: STEP + 1] == metrics(parent)[: STEP + 1]
    assert metrics(fork)[STEP + 1]["optim/lr"] == pytest.approx(0.05)
    stored = sorted(path.name for path in (fork / "rollouts").iterdir())
    assert stored == ["step_000003.parquet", "step_000004.parquet"]
    shutil.rmtree(fork)
    assert snapshot(parent) == before


def test_one_step_off_a_batch_is_kept_under_another_loss_and_sampled_anew_under_another_seed(
    async_parent: Path, tmp_path: Path
):
    loss = trained_async(
        fork_of(async_parent, tmp_path / "loss", "loss.clip_high=0.5", "optim.lr=0.05")
    )
    seed = trained_async(fork_of(async_parent, tmp_path / "seed", branch=1))
    assert responses(loss, STEP + 1) == responses(async_parent, STEP + 1)
    assert responses(seed, STEP + 1) != responses(async_parent, STEP + 1)
    stale = [row["rollout/staleness_max"] for row in metrics(seed)[1:]]
    assert stale == [0, 1, 0, 1], "the batch after the fork is sampled from the newest weights"
    # its problems come again: no position of the stream is left out
    first = min(position for position, _ in responses(seed, STEP + 1))
    assert first == 1 + max(position for position, _ in decided(async_parent, STEP))


def decided(run: Path, step: int) -> dict[tuple[int, int], list[int]]:
    """The responses of groups that were decided: the others come again in the next step."""
    rows = pq.read_table(
        run / f"rollouts/step_{step:06d}.parquet", columns=["group_id", "outcome"]
    ).to_pylist()
    kept = {row["group_id"] for row in rows if row["outcome"] != "excess"}
    return {key: tokens for key, tokens in responses(run, step).items() if key[0] in kept}


def test_the_manifest_says_where_a_run_comes_from_and_what_was_changed(
    parent: Path, tmp_path: Path
):
    fork = Fork.of(
        RunDirectory(fork_of(parent, tmp_path / "fork", "loss.clip_high=0.5", "train.num_steps=9"))
    )
    assert fork is not None
    assert (fork.parent, fork.step, fork.branch) == (str(parent), STEP, None)
    assert fork.changed == {"loss.clip_high": (0.28, 0.5), "train.num_steps": (4, 9)}
    assert (
        fork.describe() == f"step 2 of {parent}; loss.clip_high 0.28 -> 0.5, train.num_steps 4 -> 9"
    )
    assert Fork.of(RunDirectory(parent)) is None
    assert Fork.of_record(run_status(tmp_path / "fork").fork) == fork


def test_other_training_data_is_begun_at_its_first_problem(parent: Path, tmp_path: Path):
    data = "data.train={builtin: {sums: {}}, size: 30, seed: 5}"
    plan = plan_fork(RunDirectory(parent), STEP, [data, "train.num_steps=3"])
    assert plan.notes == [
        "the training data changed: after step 2 the stream starts at its first problem"
    ]
    fork = create_fork(plan, tmp_path / "fork", []).path
    resume_run(fork, [])
    assert min(position for position, _ in responses(fork, STEP + 1)) == 0
    assert len(metrics(fork)) == 4


def test_only_another_number_of_training_problems_begins_them_anew(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    problem = load_problems({"builtin": {"sums": {}}, "size": 11, "seed": 1})[0]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": problem.prompt, "answer": problem.answer}) + "\n")
    fork = fork_of(parent, tmp_path / "fork", f"data.eval={held_out}", "train.num_steps=3")
    resume_run(fork, [])
    printed = " ".join(capsys.readouterr().out.split())
    assert "and its parent had 11: the stream starts at its first problem" in printed
    assert min(position for position, _ in responses(fork, STEP + 1)) == 0
    # the number of problems stays, and so does the position
    instructed = fork_of(parent, tmp_path / "same", "data.instruction=Think.", "train.num_steps=3")
    resume_run(instructed, [])
    assert "starts at its first problem" not in capsys.readouterr().out
    assert min(responses(instructed, STEP + 1)) == min(responses(parent, STEP + 1))
    assert min(responses(parent, STEP + 1)) > (0, 0)


@for_each_row(
    ["step", "override", "message"],
    [
        (7, "optim.lr=1e-5", "has no checkpoint of step 7; there are: 1, 2, 3, 4"),
        (
            2,
            "model.name=gpt2",
            "model.name cannot change in a fork: the checkpoint holds this model's weights",
        ),
        (
            2,
            "model.dtype=float64",
            "model.dtype cannot change in a fork: the checkpoint holds master weights in float64",
        ),
        (2, "model.lora=true", "cannot change in a fork: the checkpoint holds what was trained"),
        (2, "preset=grpo", "preset cannot change in a fork: a run has a value for each option"),
        (
            4,
            "optim.lr=1e-5",
            "train.num_steps=4 leaves nothing to train; set for example train.num_steps=8",
        ),
        (2, "loss.clip_hihg=1", "did you mean loss.clip_high"),
    ],
)
def test_what_cannot_be_forked_is_refused_in_a_sentence(
    parent: Path, step: int, override: str, message: str
):
    with pytest.raises((CheckpointError, ConfigError)) as refused:
        plan_fork(RunDirectory(parent), step, [override])
    assert message in str(refused.value)


def test_it_may_change_the_options_of_the_model_that_a_resume_may_change(parent: Path):
    overrides = ["model.dtype=bfloat16", "model.trust_remote_code=true"]
    plan = plan_fork(RunDirectory(parent), STEP, overrides)
    assert plan.config.model.dtype == "bfloat16"
    assert plan.config.model.trust_remote_code is True


def test_a_fork_is_its_parent_to_the_byte_also_after_that_is_gone_and_never_half_of_it(
    parent: Path, tmp_path: Path
):
    copy = tmp_path / "parent"
    path = tmp_path / "fork"
    shutil.copytree(parent, copy)
    plan = plan_fork(RunDirectory(copy), STEP)
    (copy / "checkpoints/step_000002/problems.parquet").unlink()  # read last
    with pytest.raises(
        CheckpointError, match=r"problems.parquet has just been removed: .* removes old checkpoints"
    ):
        create_fork(plan, path, [])
    assert not path.exists()
    shutil.copy(
        parent / "checkpoints/step_000002/problems.parquet", copy / "checkpoints/step_000002"
    )
    create_fork(plan, path, [])
    shutil.rmtree(copy)
    resume_run(path, [])
    assert len(metrics(path)) == 5
    assert equal_to_parent(path, parent) == []
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps"]) == ("finished", 4)
    assert (summary["fork"]["parent"], summary["fork"]["step"]) == (str(copy), STEP)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["fork"]


@for_each_row(["kind"], [["file"], ["folder"], ["pipe"]])
def test_what_a_strangers_run_links_to_is_not_copied(parent: Path, tmp_path: Path, kind: str):
    tmp_path = tmp_path / kind
    run = tmp_path / "run"
    secret = tmp_path / "secrets" / "key.txt"
    shutil.copytree(parent, run)
    secret.parent.mkdir()
    secret.write_text("sk-secret")
    planted = run / "code" / "helper.py"
    planted.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(planted)
    else:
        planted.symlink_to(secret if kind == "file" else secret.parent)
    with pytest.raises(CheckpointError, match=r"helper\.py cannot be copied"):
        fork_of(run, tmp_path / "fork")
    assert not [
        path
        for path in (tmp_path / "fork").rglob("*")
        if path.is_file() and b"sk-secret" in path.read_bytes()
    ]
    assert not (tmp_path / "fork" / "config.yaml").exists()


def test_a_new_path_of_data_is_that_of_the_folder_where_the_fork_is_made(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    row: dict[str, Any] = {"prompt": "What is 1 + 1?", "answer": "2"}
    (tmp_path / "new.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    plan = plan_fork(RunDirectory(parent), STEP, ["data.eval=new.jsonl"])
    assert plan.config.data.eval == str(tmp_path / "new.jsonl")


def test_the_command_trains_branches_that_draw_otherwise_and_each_of_them_always_the_same(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    paths = [str(tmp_path / "b-1"), str(tmp_path / "b-2")]
    command = ("fork", str(parent), "--step", str(STEP), "--times", "2", "--json")
    options = ("optim.lr=0.05", "train.num_steps=3")
    code, out, err = run_command(capsys, *command, "--run-dir", str(tmp_path / "b"), *options)
    found = json.loads(out)
    assert (code, found["parent"], found["step"]) == (0, str(parent), STEP)
    assert [each["run"] for each in found["forks"]] == paths
    assert [each["exit_reason"] for each in found["forks"]] == ["finished", "finished"]
    assert found["forks"][0]["changed"]["optim.lr"] == {"parent": 0.0005, "fork": 0.05}
    assert "the seed changed: after step 2 the order of the problems and all random numbers" in err
    again = fork_of(parent, tmp_path / "again", *options, branch=1)
    resume_run(again, [])
    forks = [*map(Path, paths), again]
    assert [metrics(fork)[-1]["step"] for fork in forks] == [3, 3, 3]
    assert [Fork.of(RunDirectory(fork)).branch for fork in forks] == [1, 2, 1]  # type: ignore[union-attr]
    one, two, _ = (responses(fork, STEP + 1) for fork in forks)
    assert one != two
    assert responses(parent, STEP + 1) not in (one, two)
    assert differences(contents(forks[0]), contents(again)) == []


def test_a_fork_of_the_current_folder_stands_next_to_it(
    parent: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run = shutil.copytree(parent, tmp_path / "run")
    monkeypatch.chdir(run)
    code, _, err = run_command(capsys, "fork", ".", "--step", str(STEP), "--no-train")
    assert code == 0, err
    (fork,) = tmp_path.glob(f"run-step{STEP}-*")
    assert json.loads((fork / "manifest.json").read_text())["fork"]["parent"] == str(run)


def test_an_option_that_cannot_work_is_refused_before_anything_is_written(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ("fork", str(parent), "--step", "3", "--run-dir", str(tmp_path / "b"))
    code, _, err = run_command(capsys, *command, "reward.verifier=maht")
    assert (code, "did you mean math?" in err) == (2, True)
    code, _, err = run_command(capsys, *command[:-1], str(parent))
    assert (code, "already holds a run" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import dapo
def reward(completions, answer, **columns):
    return [sum(map(str.isdigit, text)) + (right in text) for text, right in zip(completions, answer)]
rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
dapo.train("tiny-random", data=rows, reward=reward, steps=2, prompts_per_step=2, group_size=4, max_response_tokens=6,
           threads=1, workers=1, lr=1e-3, save_every=1, keep_checkpoints=9, run_dir="run")
"""


def test_a_fork_takes_rows_and_rewards_that_were_typed_in_a_script_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    run_script([str(script)])
    fork = fork_of(tmp_path / "run", tmp_path / "fork", step=1)
    script.unlink()
    (tmp_path / "run").rename(tmp_path / "gone")
    # what the process that forked has imported, another one has not
    module = load_config(fork / "config.yaml").reward.verifier.partition(":")[0]
    sys.modules.pop(module, None)
    CODE_FOLDERS.clear()
    resume_run(fork, [])
    assert equal_to_parent(fork, tmp_path / "gone", step=1) == []
