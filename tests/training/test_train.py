"""A run as a whole: equal runs are equal bytes, a resumed run is the uninterrupted one, and the
golden run stays.
"""

import json
import math
import shutil
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from pyarrow.parquet import read_table

import dapo
from dapo.cli.train import resume_run, start_run
from dapo.config import load_config
from dapo.core.errors import EngineError, ShortfallError
from dapo.distributed.engine_specs import open_engine
from dapo.distributed.protocol import WorkerSpec
from dapo.engines.native.linear_probe import linear_shapes
from dapo.libs.cpu_kernels import is_compiled
from dapo.libs.cpu_kernels.prepacked import (
    COMPILED,
    KERNELS,
    LAYERS,
    default_kernel,
    multiplies,
    shape_name,
)
from dapo.policy.model import load_model
from dapo.start import build
from dapo.types import GenerationRequest
from helpers.finished_runs import cut_copy
from helpers.recorded_runs import assert_as_recorded, golden_run
from helpers.tiny_runs import contents, metrics, saved_steps, tiny

PACKAGE = str(Path(dapo.__file__).parent)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of configs/tiny.yaml that keeps its checkpoints, those of steps 2, 4 and 5."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    start_run(tiny("train.keep_checkpoints=9"), run_dir=path, config_name="tiny")
    return path


def test_two_runs_of_one_config_are_equal_to_the_byte(whole: Path, tmp_path: Path):
    start_run(tiny("train.keep_checkpoints=9"), run_dir=tmp_path / "b", config_name="tiny")
    a = contents(whole)
    assert len(a["files"]) > 10
    assert a == contents(tmp_path / "b")


def test_another_seed_is_another_run(whole: Path, tmp_path: Path):
    start_run(tiny("train.num_steps=1", "train.seed=1"), run_dir=tmp_path / "b", config_name="tiny")
    assert responses(tmp_path / "b") != responses(whole)


def responses(run: Path) -> list[str]:
    """The responses of the first step."""
    texts: list[str] = read_table(run / "rollouts/step_000001.parquet")["response"].to_pylist()
    return texts


@pytest.mark.parametrize("last_checkpoint", [2, 4])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_byte(
    whole: Path, tmp_path: Path, last_checkpoint: int
):
    # what a crash after that checkpoint leaves behind: later steps in the metrics, no later
    # checkpoint
    cut = cut_copy(whole, tmp_path / "cut", step=last_checkpoint)
    resume_run(cut, [])
    assert contents(cut) == contents(whole)


@pytest.mark.skipif(
    default_kernel(torch.float32) is None, reason="this torch prepacks no weights in float32"
)
def test_a_resumed_run_takes_the_kernels_that_it_recorded_also_in_an_engine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # small products of all libraries are equal to the last bit, so a kernel is made that counts its
    # products
    used: Counter[tuple[int, ...]] = Counter()

    class Counting(KERNELS["plain"]):  # type: ignore[misc]
        def multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            used[tuple(self._weight.shape)] += 1
            return super().multiply(inputs, bias)

    monkeypatch.setitem(KERNELS, "counting", Counting)  # type: ignore[arg-type]
    assert multiplies("counting", torch.float32)  # asked once, and not counted below
    used.clear()
    options = ["model.dtype=float32", "train.eval_every=0", "train.num_steps=1"]
    start_run(tiny(*options), run_dir=tmp_path / "auto", config_name="tiny")
    recorded = load_config(tmp_path / "auto" / "config.yaml").rollout.native.kernels
    assert recorded == ({LAYERS: COMPILED} if is_compiled() else {})  # small weights are not timed
    assert not used
    shapes = linear_shapes(load_model("tiny-random", dtype=torch.float32).model)
    kernels = json.dumps({shape_name(*shape): "counting" for shape in shapes})
    path = tmp_path / "run"
    start_run(tiny(*options, f"rollout.native.kernels={kernels}"), run_dir=path, config_name="tiny")
    in_first_step = set(used)
    used.clear()

    specs: list[WorkerSpec] = []

    def not_started(launcher: Any, wanted: list[WorkerSpec], **options: Any) -> None:
        specs.extend(wanted)
        raise EngineError("not started")

    monkeypatch.setattr(build, "EnginePool", not_started)
    with pytest.raises(EngineError, match="not started"):
        resume_run(path, ["train.num_steps=2", "rollout.engines=1"])
    assert [spec.factory for spec in specs] == ["dapo.distributed.engine_specs:open_engine"]
    own = open_engine(**specs[0].options)
    own.submit(
        [
            GenerationRequest(
                "a", (4, 5), max_new_tokens=3, temperature=1.0, top_p=1.0, seed=0, stop_ids=()
            )
        ]
    )
    while own.in_flight:
        own.poll()
    in_own_process = set(used)
    used.clear()
    resume_run(path, ["train.num_steps=2"])
    assert set(used) == in_own_process == in_first_step
    assert used.keys() <= shapes
    # queries, keys and values in one; the attention's output; the two of the MLP
    assert len(used) >= 4


def test_a_finished_run_can_be_extended(whole: Path, tmp_path: Path):
    path = tmp_path / "run"
    start_run(tiny("train.num_steps=3", "train.eval_every=0"), run_dir=path, config_name="tiny")
    resume_run(path, ["train.num_steps=5"])
    extended = metrics(path)
    assert [row["step"] for row in extended] == [0, 1, 2, 3, 4, 5]
    assert without_evaluations(extended[-1]) == without_evaluations(metrics(whole)[-1])


def without_evaluations(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("eval/")}


def test_the_first_learning_rates_are_the_list_one_expects(whole: Path):
    rates = [row["optim/lr"] for row in metrics(whole)[1:]]
    assert rates == pytest.approx([0.0015, 0.003, 0.003, 0.003, 0.003])


def test_a_falling_rate_and_a_loss_of_ones_own_resume_exactly_and_a_longer_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = [
        "loss.function=examples.losses:reinforce",
        "optim.schedule=cosine",
        "optim.lr=0.02",
        "train.eval_every=0",
    ]
    options += [
        "optim.warmup_steps=1",
        "train.save_every=2",
        "train.keep_checkpoints=9",
        "data.eval=null",
    ]
    start_run(tiny(*options), run_dir=tmp_path / "whole", config_name="tiny")
    rows = metrics(tmp_path / "whole")
    expected = [0.02 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 4)) / 2) for step in range(5)]
    assert [row["optim/lr"] for row in rows] == pytest.approx(expected)
    assert expected[-1] == pytest.approx(0.002)
    assert all(0 < row["loss/pushed_up"] < 1 for row in rows)
    assert not [name for row in rows for name in row if "clip_" in name]
    assert rows[-1]["reward/accuracy"] > rows[0]["reward/accuracy"] + 0.1  # REINFORCE learns

    cut_copy(tmp_path / "whole", tmp_path / "cut", step=2)
    shutil.copytree(tmp_path / "cut", tmp_path / "longer")
    resume_run(tmp_path / "cut", [])
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert "train.num_steps was" not in capsys.readouterr().out
    resume_run(tmp_path / "longer", ["train.num_steps=6"])
    assert (
        "warning: train.num_steps was 5 up to step 2 and is 6 now; from here on, the learning rate "
        "(optim.schedule=cosine) falls until there" in " ".join(capsys.readouterr().out.split())
    )
    rates = [row["optim/lr"] for row in metrics(tmp_path / "longer")]
    assert rates[:2] == [row["optim/lr"] for row in rows[:2]]
    longer = [
        0.02 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 5)) / 2) for step in range(2, len(rates))
    ]
    assert rates[2:] == pytest.approx(longer)
    assert len(rates) >= 5  # it may solve its problems before step 6


def test_the_grpo_baseline_trains_every_group_with_a_reference(tmp_path: Path):
    start_run(
        tiny("preset=grpo", "loss.kl_coef=0.1", "train.num_steps=2"),
        run_dir=tmp_path / "r",
        config_name="t",
    )
    for row in metrics(tmp_path / "r")[1:]:
        assert row["rollout/groups_generated"] == row["rollout/groups_trained"] == 4
        assert row["loss/kl"] >= 0
    assert metrics(tmp_path / "r")[2]["loss/kl"] > 0  # the policy has left its reference


def changing_reward(folder: Path, then: bool) -> list[str]:
    return [
        "reward.verifier=helpers.reward_functions:has_digit_until",
        f"reward.options={{folder: {folder}, then: {str(then).lower()}}}",
    ]


def test_a_run_whose_problems_are_solved_is_evaluated_and_saved_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "f"
    path = tmp_path / "f" / "run"
    folder.mkdir()
    options = [
        "train.num_steps=3",
        "train.save_every=1",
        "train.eval_every=0",
        *changing_reward(folder, True),
    ]
    start_run(tiny(*options, "train.num_steps=2"), run_dir=path, config_name="t")
    (folder / "now").touch()
    # resuming it is no error either, and repeats nothing
    solved = ["solved: all 16 groups of step 3 are all correct", "the run ends after step 2\n"]
    for said in (solved, ["already solved at step 2 of 9: all responses of its last search"]):
        resume_run(path, ["train.num_steps=9"])
        printed = capsys.readouterr().out
        assert [words for words in said if words not in printed] == []
        summary = json.loads((path / "summary.json").read_text())
        assert (summary["exit_reason"], summary["steps"]) == ("solved", 2)
        assert summary["eval_last"]["step"] == 2
        assert saved_steps(path)[-1] == "step_000002"
        assert [row["step"] for row in metrics(path)] == [0, 1, 2]


def test_all_correct_before_anything_was_learned_is_an_error_that_doubts_the_reward(tmp_path: Path):
    constant = ["reward.verifier=helpers.reward_functions:always", "reward.options={verdict: true}"]
    with pytest.raises(
        ShortfallError,
        match=r"step 1: nothing to learn from, in 16 groups: 16 all correct\n.* reward",
    ):
        start_run(tiny(*constant), run_dir=tmp_path / "r", config_name="t")
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert summary["exit_reason"].startswith("ShortfallError: step 1: nothing to learn from")


def test_a_step_with_nothing_to_learn_changes_no_weight_and_the_third_in_a_row_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "f"
    path = tmp_path / "f" / "run"
    folder.mkdir()
    options = ["train.save_every=1", "train.keep_checkpoints=9", *changing_reward(folder, False)]
    start_run(tiny(*options, "train.num_steps=2"), run_dir=path, config_name="t")
    (folder / "now").touch()
    for _ in range(2):
        with pytest.raises(
            ShortfallError, match=r"^3 steps in a row, the last of them step 5: .* 16 all wrong\n"
        ):
            resume_run(path, ["train.num_steps=9"])
        rows = metrics(path)
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        assert [row["rollout/shortfall_groups"] for row in rows[3:]] == [4, 4]
        weights = [
            (path / f"checkpoints/step_00000{step}/weights.safetensors").read_bytes()
            for step in (2, 3, 4)
        ]
        assert weights[0] == weights[1] == weights[2]
    assert (
        f"with the same options the step would fail again: dapo resume {path} OPTION"
        in capsys.readouterr().out
    )


def test_a_reward_without_spread_is_named_once_where_every_group_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    constant = [
        "reward.verifier=helpers.reward_functions:always",
        "reward.options={verdict: false}",
    ]
    config = tiny(
        "preset=grpo", "overlong.mode=off", "train.num_steps=2", "data.eval=null", *constant
    )
    start_run(config, run_dir=tmp_path / "r", config_name="t")
    printed = capsys.readouterr().out
    assert printed.count("the limit: every response to 4 prompts is wrong, so nothing is") == 1
    assert printed.count("is wrong, so nothing is") == 1


def test_every_judged_response_is_written_with_the_outcome_of_its_group(whole: Path):
    for row in metrics(whole)[1:]:
        table = read_table(whole / f"rollouts/step_{row['step']:06d}.parquet").to_pylist()
        trained = [sample for sample in table if sample["outcome"] == "trained"]
        assert len(trained) == 4 * row["rollout/groups_trained"]
        assert sum(sample["response_tokens"] for sample in trained) == row["rollout/tokens_trained"]
        for group in {sample["group_id"] for sample in trained}:
            advantages = [sample["advantage"] for sample in trained if sample["group_id"] == group]
            assert sum(advantages) == pytest.approx(0, abs=1e-6)
        assert all(
            sample["advantage"] is None for sample in table if sample["outcome"] != "trained"
        )
        assert all(
            len(s["response_ids"]) == len(s["engine_logprobs"]) == s["response_tokens"]
            for s in table
        )


def test_tables_of_responses_can_be_smaller_of_the_last_steps_or_none_also_after_a_resume(
    tmp_path: Path,
):
    def steps(run: Path) -> list[str]:
        return sorted(path.name for path in (run / "rollouts").glob("*"))

    run = tmp_path / "last"
    start_run(tiny("train.num_steps=3", "log.rollouts=last:2"), run_dir=run, config_name="t")
    assert steps(run) == ["step_000002.parquet", "step_000003.parquet"]
    resume_run(run, ["train.num_steps=4", "log.rollouts=no-logprobs"])
    assert steps(run) == ["step_000002.parquet", "step_000003.parquet", "step_000004.parquet"]
    tables = [read_table(run / "rollouts" / name).to_pylist() for name in steps(run)]
    assert [all(row["engine_logprobs"] is None for row in table) for table in tables] == [
        False,
        False,
        True,
    ]
    assert all(len(row["response_ids"]) == row["response_tokens"] for row in tables[2])
    resume_run(run, ["train.num_steps=5", "log.rollouts=last:1"])
    assert steps(run) == ["step_000005.parquet"]
    start_run(
        tiny("train.num_steps=1", "log.rollouts=none"), run_dir=tmp_path / "none", config_name="t"
    )
    assert steps(tmp_path / "none") == []
    assert len(metrics(tmp_path / "none")) == 2


def test_the_golden_run_of_20_steps_stays_as_it_was(tmp_path: Path):
    """float64, so that only a change of the algorithm moves it.

    Made anew by `make golden`, with a reason.
    """
    now = golden_run(tmp_path / "run")
    assert [row["step"] for row in now] == list(range(21))
    assert_as_recorded(now)


def test_at_most_five_functions_lie_between_the_command_and_backward(tmp_path: Path):
    stacks: list[list[str]] = []

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", "") == "run_backward":
            stacks.append(
                [
                    summary.name
                    for summary in traceback.extract_stack(frame)
                    if PACKAGE in summary.filename
                ]
            )

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        start_run(
            tiny("train.num_steps=1", "data.eval=null"),
            run_dir=tmp_path / "run",
            config_name="tiny",
        )
    finally:
        sys.setprofile(before)
    command, *between = stacks[0]
    assert command == "start_run"
    assert len(between) <= 5, between
