"""Laws of `schedule: async`: what a bound of 0 and of 1 equals, and what holds for every bound on
staleness.
"""

import json
import random
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.parquet import read_table
from safetensors.torch import load_file

from benchmarks.scripted_engine import ScriptedEngine
from dapo.core.errors import EngineError, NumericsError, ShortfallError
from dapo.core.rng import keyed_uniforms
from dapo.core.waiting import Interrupted
from dapo.policy.model import load_model
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import OUTCOMES
from dapo.training import step_metrics
from dapo.training.saved_state import is_logged
from dapo.training.state import Run
from dapo.types import Generation, GenerationRequest
from helpers.async_runs import async_config, resumed_from, run_or_resume
from helpers.fake_rollout import END, FILL, RIGHT, WRONG, SlowJudge
from helpers.finished_runs import cut_copy
from helpers.recorded_runs import GOLDEN_SCHEDULES, PREDICTIONS, SCHEDULES, recorded_schedule
from helpers.scripted_runs import CountingPolicy, scripted_run
from helpers.tiny_runs import EVENTFUL, contents, differences, metrics


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_recorded_runs_of_each_schedule_stay_as_they_were(tmp_path: Path, name: str):
    found = recorded_schedule(tmp_path / "run", *SCHEDULES[name])
    golden = json.loads(GOLDEN_SCHEDULES.read_text())[name]
    assert len(golden) > 10
    assert [
        file for file in found.keys() | golden.keys() if found.get(file) != golden.get(file)
    ] == []


# --- what holds for every bound -------------------------------------------------------------------------------------


class VersionedEngine(ScriptedEngine):
    """Its log-probabilities tell which weights sampled a token, and which token of the response it
    is.
    """

    def _generation(self, request: GenerationRequest, token_ids: Any, finish: Any) -> Generation:
        indices = range(request.offset, request.offset + len(token_ids))
        logprobs = tuple(-1.0 - self._require_weights() - index / 1024 for index in indices)
        return Generation(request.id, token_ids, logprobs, finish, self._require_weights())


def long_script(longest: int) -> Any:
    def script(request: GenerationRequest) -> tuple[list[int], str]:
        mark, length = keyed_uniforms(request.seed, 2)
        return [RIGHT if mark < 0.5 else WRONG] + [FILL] * int(length**3 * longest) + [END], "stop"

    return script


def rows_of_steps(run: Path) -> list[list[dict[str, Any]]]:
    return [read_table(path).to_pylist() for path in sorted((run / "rollouts").iterdir())]


def versions_of(row: dict[str, Any]) -> list[int]:
    """The version that sampled each token of a stored response."""
    flat = row.get("versions") or [0, row["version"]]
    starts = [*flat[::2], len(row["response_ids"])]
    named = flat[1::2]
    return [
        version
        for (a, b), version in zip(pairwise(starts), named, strict=True)
        for _ in range(b - a)
    ]


@settings(max_examples=20, deadline=None)
@given(
    eta=st.integers(0, 5),
    prompts=st.sampled_from([2, 4, 6]),
    group=st.integers(2, 5),
    slots=st.integers(2, 60),
    longest=st.integers(1, 150),
    seed=st.integers(0, 10**6),
)
def test_no_trained_token_is_staler_than_the_bound_and_everything_is_counted(
    eta: int, prompts: int, group: int, slots: int, longest: int, seed: int
):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        options = (
            "schedule=async",
            f"max_staleness={eta}",
            "train.num_steps=7",
            f"rollout.prompts_per_step={prompts}",
            f"rollout.group_size={group}",
            "rollout.max_response_tokens=128",
            f"train.seed={seed}",
            f"dynamic_sampling.max_groups_per_step={8 * prompts}",
        )
        engine = VersionedEngine(long_script(longest), slots=slots)
        state = scripted_run(path, *options, engine=engine)
        counted = metrics(path)
        tables = rows_of_steps(path)
        decided: list[int] = []
        for step, (row, table) in enumerate(
            zip([r for r in counted if r["step"]], tables, strict=True), start=1
        ):
            for kind in ("groups", "tokens"):
                counts = [row.get(f"rollout/{kind}_{outcome}", 0) for outcome in OUTCOMES]
                assert row[f"rollout/{kind}_generated"] == sum(counts)
            for each in table:
                named = versions_of(each)
                assert each["engine_logprobs"] == [
                    -1.0 - v - index / 1024 for index, v in enumerate(named)
                ]
                if each["outcome"] == "trained":
                    assert all(0 <= step - 1 - version <= eta for version in named)
            decided += [
                each["group_id"]
                for each in table
                if each["sample"] == 0 and each["outcome"] != "excess"
            ]
            if eta > 0:
                assert 0 <= row["rollout/staleness_mean"] <= row["rollout/staleness_max"] <= eta
            assert ("rollout/groups_stale" in row) <= (eta > 1)
        assert decided == list(range(len(decided)))  # no problem is lost or repeated
        assert state.state.tokens_generated == sum(
            row["rollout/tokens_generated"] for row in counted if row["step"]
        )
        assert eta == 0 or not state.sampling.kept.groups


ASYNC = ("schedule=async", "max_staleness=3")
LONG = (
    "rollout.max_response_tokens=64",
    "train.num_steps=6",
    "train.save_every=1",
    "train.keep_checkpoints=9",
)


def long_run(path: Path, *options: str, slots: int = 24, **parts: Any) -> Run:
    engine = parts.pop("engine", None) or VersionedEngine(long_script(60), slots=slots)
    return scripted_run(path, *ASYNC, *LONG, *options, engine=engine, **parts)


def test_the_runs_of_these_tests_have_everything_that_can_break_a_guarantee(tmp_path: Path):
    """Responses of three versions and more, groups that begin again, and staleness up to the
    bound.
    """
    for eta in (2, 4):
        long_run(tmp_path / f"run{eta}", f"max_staleness={eta}", "train.num_steps=8")
        rows = [row for row in metrics(tmp_path / f"run{eta}") if row["step"]]
        assert max(row["rollout/staleness_max"] for row in rows) == eta
        assert sum(row["rollout/recomputed_tokens"] for row in rows) > 0
        responses = [each for table in rows_of_steps(tmp_path / f"run{eta}") for each in table]
        assert max(len(set(versions_of(each))) for each in responses) >= (2 if eta == 2 else 3)
        if eta == 2:
            assert sum(row.get("rollout/groups_stale", 0) for row in rows) > 0


class SlowEngine(VersionedEngine):
    """Takes a random time for some polls."""

    chance = random.Random(0)

    def poll(self) -> list[Generation]:
        time.sleep(self.chance.choice([0, 0, 0.004]))
        return super().poll()


@pytest.mark.parametrize("options", [(), PREDICTIONS], ids=["", "predictions"])
def test_no_delay_of_engine_verifiers_or_trainer_changes_a_byte(
    tmp_path: Path, options: tuple[str, ...]
):
    chance = random.Random(1)

    def update(number: int) -> None:
        time.sleep(0.03 * chance.random())

    def change(run: Run) -> None:
        run.sampling.judge = SlowJudge(random.Random(0), longest_s=0.02)

    long_run(tmp_path / "plain", *options)
    slow = SlowEngine(long_script(60), slots=24)
    long_run(
        tmp_path / "slow",
        *options,
        engine=slow,
        policy=CountingPolicy(on_update=update),
        change=change,
    )
    assert differences(contents(tmp_path / "slow"), contents(tmp_path / "plain")) == []


@pytest.mark.parametrize("options", [(), PREDICTIONS], ids=["", "predictions"])
def test_from_any_step_it_ends_as_the_uninterrupted_run_to_the_byte(
    tmp_path: Path, options: tuple[str, ...]
):
    whole = tmp_path / "whole"
    long_run(whole, *options)
    assert [
        (whole / f"checkpoints/step_00000{i}/kept_groups.json").exists() for i in range(1, 7)
    ] == [True] * 4 + [False] * 2
    for step in range(1, 6):
        run = cut_copy(whole, tmp_path / f"run{step}", step=step)
        directory = RunDirectory(run)
        directory.truncate_after(step, is_logged=is_logged(directory.checkpoints.find(step)))
        long_run(run, *options)
        assert differences(contents(run), contents(whole)) == []


def test_a_step_that_fails_before_its_first_update_is_undone_with_its_kept_groups(tmp_path: Path):
    """Two updates a step: the third is the first one of step 2."""
    long_run(tmp_path / "whole", "train.save_every=0")
    run = tmp_path / "run"

    def update(made: int) -> None:
        if made == 3:
            raise NumericsError("the gradient norm was not finite")

    with pytest.raises(NumericsError):
        long_run(run, "train.save_every=0", policy=CountingPolicy(on_update=update))
    assert (run / "checkpoints/step_000001/kept_groups.json").exists()
    long_run(run, "train.save_every=0")
    last = "step_000006"
    assert (
        differences(contents(run, checkpoints=last), contents(tmp_path / "whole", checkpoints=last))
        == []
    )


def test_a_lost_engine_costs_the_batch_and_not_the_kept_groups(tmp_path: Path):
    """The resumed run samples the batch from the newest policy, and goes on with what is still
    within the bound.
    """

    class LostEngine(VersionedEngine):
        def poll(self) -> list[Generation]:
            if self.loaded[-1] == 2 and self.is_updating.wait(20):
                raise EngineError("the engine is gone")
            return super().poll()

        is_updating = threading.Event()

    def update(number: int) -> None:
        if number == 6:
            LostEngine.is_updating.set()

    run = tmp_path / "run"
    engine = LostEngine(long_script(60), slots=24)
    with pytest.raises(EngineError, match="the engine is gone"):
        long_run(run, "train.save_every=0", engine=engine, policy=CountingPolicy(on_update=update))
    assert {path.name for path in (run / "checkpoints/step_000003").iterdir()} >= {
        "kept_groups.json"
    }
    long_run(run, "train.save_every=0")
    rows = [row for row in metrics(run) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["rollout/staleness_max"] for row in rows) <= 3
    rows = [each for table in rows_of_steps(run) for each in table if each["sample"] == 0]
    # the rest of the last batch
    decided = [each["group_id"] for each in rows if each["outcome"] != "excess"]
    assert decided == list(range(len(decided)))


@pytest.mark.parametrize(("moment", "saved"), [("before", 2), ("during", 3)])
def test_a_signal_saves_the_kept_groups_and_the_resumed_run_is_equal(
    tmp_path: Path, moment: str, saved: int
):
    """Two updates a step: a signal before the first of step 3 undoes it, one during it lets it
    end.
    """
    last = "step_000006"
    long_run(tmp_path / "whole", "train.save_every=0")
    run = tmp_path / "run"
    policy = CountingPolicy()

    def with_signal(training_run: Run) -> None:
        def signal_comes(updates: int) -> None:
            if updates == (4 if moment == "before" else 5):
                training_run.stop.signum = signal.SIGTERM

        policy.before_updates = signal_comes if moment == "before" else policy.before_updates
        policy.on_update = signal_comes if moment == "during" else policy.on_update

    with pytest.raises(Interrupted):
        long_run(run, "train.save_every=0", policy=policy, change=with_signal)
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{saved:06d}"]
    assert (run / f"checkpoints/step_{saved:06d}/kept_groups.json").exists()
    long_run(run, "train.save_every=0")
    assert (
        differences(contents(run, checkpoints=last), contents(tmp_path / "whole", checkpoints=last))
        == []
    )


def test_a_token_budget_ends_the_run_gives_up_the_kept_groups_and_loses_no_problem(tmp_path: Path):
    long_run(tmp_path / "whole")
    rows = [row for row in metrics(tmp_path / "whole") if row["step"]]
    budget = sum(row["rollout/tokens_generated"] for row in rows[:2]) + 1
    state = long_run(tmp_path / "run", f"train.token_budget={budget}")
    assert state.state.step == 3
    assert not state.sampling.kept.groups
    assert state.sampling.tokens_discarded > 0
    assert not (tmp_path / "run/checkpoints/step_000003/kept_groups.json").exists()
    long_run(tmp_path / "run", "train.token_budget=1000000", "train.num_steps=5")
    found = [each["group_id"] for table in rows_of_steps(tmp_path / "run") for each in table]
    assert sorted(set(found)) == list(range(max(found) + 1))


def test_three_steps_without_groups_stop_a_run_whose_problems_all_come_again(tmp_path: Path):
    def hopeless(request: GenerationRequest) -> tuple[list[int], str]:
        script = long_script(60)
        return ([WRONG, END], "stop") if int(request.id.partition("/")[0]) >= 3 else script(request)

    run = tmp_path / "run"
    options = ("dynamic_sampling.max_groups_per_step=12",)
    with pytest.raises(ShortfallError, match="nothing to learn from"):
        long_run(run, *options, engine=VersionedEngine(hopeless, slots=24))
    long_run(run, *options)
    decided = [
        each["group_id"]
        for table in rows_of_steps(run)
        for each in table
        if each["sample"] == 0 and each["outcome"] != "excess"
    ]
    assert decided == list(range(len(decided)))
    assert [row["step"] for row in metrics(run) if row["step"]] == [1, 2, 3, 4, 5, 6]


def test_a_batch_of_solved_problems_ends_the_run_well(tmp_path: Path):
    def easy(request: GenerationRequest) -> tuple[list[int], str]:
        script = long_script(60)
        return ([RIGHT, END], "stop") if int(request.id.partition("/")[0]) >= 2 else script(request)

    for _ in range(2):
        run = long_run(
            tmp_path / "run", "train.num_steps=20", engine=VersionedEngine(easy, slots=24)
        )
        assert run.is_solved
        assert not (run.directory.checkpoints.latest(warn=print) / "kept_groups.json").exists()  # type: ignore[operator]


# --- with a model ---------------------------------------------------------------------------------------------------

MODEL = (
    *EVENTFUL,
    *ASYNC,
    "rollout.max_response_tokens=24",
    "train.num_steps=6",
    "train.keep_checkpoints=9",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny model with evaluations and a checkpoint after each step."""
    run = tmp_path_factory.mktemp("model") / "run"
    run_or_resume(run, async_config(*MODEL, "train.save_every=1"))
    return run


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_model_resumed_from_any_step_ends_as_the_uninterrupted_run_to_the_byte(
    whole: Path, tmp_path: Path, step: int
):
    resumed_from(whole, tmp_path / "run", step=step)
    assert differences(contents(tmp_path / "run"), contents(whole)) == []


def test_an_engine_that_evaluates_is_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a clock that an evaluation alone moves on, by a minute."""
    evaluate = step_metrics._evaluate
    evaluated = []

    def slow(run: Run, step: int) -> Any:
        evaluated.append(step)
        return evaluate(run, step)

    monkeypatch.setattr(step_metrics, "_evaluate", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: 60.0 * len(evaluated))
    run_or_resume(tmp_path / "run", async_config(*MODEL, "train.num_steps=4", "train.eval_every=1"))
    logged = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rows = [row for row in logged if row["step"]]
    assert evaluated == [0, 1, 2, 3, 4]
    assert sum(row.get("time/engine_idle_s", 0) for row in rows) == 0
    assert sum(row.get("time/step_s", 0) for row in rows) > 0


def test_each_log_probability_is_that_of_a_forward_with_the_weights_of_its_version(whole: Path):
    loaded = load_model(async_config().model.name, dtype=torch.float32)
    tokenizer = loaded.tokenizer
    models = {0: loaded.model}
    for step in range(1, 7):
        (file,) = (whole / "checkpoints" / f"step_{step:06d}").glob("weights*.safetensors")
        models[step] = load_model(async_config().model.name, dtype=torch.float32).model
        models[step].load_state_dict(load_file(file), strict=False)
    checked = 0
    mixed = 0
    for row in [row for table in rows_of_steps(whole) for row in table]:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        assert len(prompt) == row["prompt_tokens"]
        ids = row["response_ids"]
        named = versions_of(row)
        for version in set(named):
            with torch.no_grad():
                logits = models[version](torch.tensor([prompt + ids])).logits[
                    0, len(prompt) - 1 : -1
                ]
            expected = logits.log_softmax(-1)[range(len(ids)), ids]
            mine = torch.tensor([v == version for v in named])
            gap = (torch.tensor(row["engine_logprobs"]) - expected)[mine].abs().max()
            assert gap < 1e-5, (row["step"], row["group_id"], version)
        checked = checked + len(ids)
        mixed = mixed + (len(set(named)) > 1)
    assert checked > 500
    assert mixed > 5
