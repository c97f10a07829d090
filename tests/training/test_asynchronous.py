"""`schedule: async` with `max_staleness: 1`: what it samples when, what it trains on, and that
nothing is lost.
"""

import copy
import json
import math
import os
import random
import shutil
import signal
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow.parquet import read_table, write_table
from safetensors.torch import load_file

from benchmarks.scripted_engine import ScriptedEngine
from dapo.analysis.check.summary import explain
from dapo.cli.train import resume_run
from dapo.config import Config, build_config, dump_config, load_config
from dapo.core.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    NumericsError,
    ShortfallError,
)
from dapo.core.waiting import Interrupted
from dapo.data.stream import ProblemStream
from dapo.engines.checked import CheckedEngine, with_arrays
from dapo.evaluation.scores import EvaluationPlan
from dapo.runs.outcomes import COUNTED, OUTCOMES
from dapo.sampling.batch import SamplingStart
from dapo.sampling.continuous import PrefetchedBatch
from dapo.sampling.queue import Batch
from dapo.sampling.rollout_metrics import staleness_metrics
from dapo.sampling.saved_groups import SavedGroups, read_groups, write_groups
from dapo.sampling.selection import Prediction
from dapo.training.state import Run
from dapo.types import Generation, GenerationRequest, Group, Problem, Verdict
from examples.minimal_dapo import Group as MinimalGroup
from examples.minimal_dapo import MinimalDapo
from helpers.async_runs import ONE_STEP_OFF, async_config, resumed_from, run_or_resume
from helpers.fake_rollout import END, FILL, RIGHT, WRONG, problems, random_script
from helpers.fork_server import AREAS, ForkServer
from helpers.minimal_runs import STEPS, minimal_config, minimal_inputs
from helpers.scripted_runs import CountingPolicy, scripted_run
from helpers.tiny_policies import loaded, make_policy
from helpers.tiny_runs import CONFIGS, EVENTFUL, contents, differences, metrics, tiny

# --- runs without a model: a scripted engine, and a policy that only counts -----------------------------------------


class RequestLoggingEngine(ScriptedEngine):
    """Notes what is asked of it, each kind of request once in a row: `load 1`, `batch 2`,
    `evaluation`.
    """

    def __init__(self, script: Any = random_script, **options: Any) -> None:
        super().__init__(script, **options)
        self.notes: list[str] = []

    def load_weights(self, weights: Any, version: int) -> None:
        super().load_weights(weights, version)
        self.notes.append(f"load {version}")

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        super().submit(requests)
        kind = requests[0].id.split("/")[0]
        note = "evaluation" if kind == "eval" else f"batch {kind}"
        if not self.notes or self.notes[-1] != note:
            self.notes.append(note)


class WaitingEngine(ScriptedEngine):
    """In the thread that samples the batch of a step, the first poll waits for `when`, and calls
    `then`.
    """

    def __init__(
        self, step: int, when: threading.Event, then: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(random_script)
        self._thread = f"dapo-batch-{step}_0"
        self._when = when
        self._then = then

    def poll(self) -> list[Generation]:
        if threading.current_thread().name == self._thread:
            assert self._when.wait(20)
            self._then()
        return super().poll()


class UnresponsiveEngine(ScriptedEngine):
    """Never answers the thread that samples the batch of step 3."""

    def poll(self) -> list[Generation]:
        return [] if threading.current_thread().name == "dapo-batch-3_0" else super().poll()


def gone() -> None:
    raise EngineError("the engine is gone")


def versions(run: Path) -> list[set[int]]:
    """Of the weights that sampled each step's responses."""
    return [
        set(read_table(path)["version"].to_pylist())
        for path in sorted((run / "rollouts").iterdir())
    ]


def trained_rows(run: Path) -> list[dict[str, Any]]:
    """The stored responses that trained."""
    tables = [read_table(path).to_pylist() for path in sorted((run / "rollouts").iterdir())]
    return [row for rows in tables for row in rows if row["advantage"] is not None]


def decided_positions(run: Path) -> list[int]:
    """Places in the stream of all decided groups, step after step."""
    tables = [read_table(path).to_pylist() for path in sorted((run / "rollouts").iterdir())]
    return [
        row["group_id"]
        for rows in tables
        for row in rows
        if row["outcome"] != "excess" and row["sample"] == 0
    ]


def prefetched_steps(run: Path) -> dict[str, int | None]:
    """The step of the batch that each checkpoint holds."""
    files = {path: path / "prefetched_batch.json" for path in (run / "checkpoints").iterdir()}
    return {
        path.name: json.loads(file.read_text())["step"] if file.exists() else None
        for path, file in files.items()
    }


class TestWhatIsSampledWhen:
    def test_every_batch_but_the_first_is_of_the_policy_before_the_last_step(self, tmp_path: Path):
        engine = RequestLoggingEngine()
        scripted_run(tmp_path / "run", engine=engine)
        assert versions(tmp_path / "run") == [{0}, {0}, {1}, {2}]
        # an evaluation is due before the first step and after the last; here it has no problems
        assert engine.notes == [
            "load 0",
            "batch 1",
            "batch 2",
            "load 1",
            "batch 3",
            "load 2",
            "batch 4",
            "load 4",
        ]
        rows = metrics(tmp_path / "run")[-4:]
        assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 1, 1]
        assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]

    def test_evaluations_have_the_newest_weights_and_the_engine_for_themselves(
        self, tmp_path: Path
    ):
        engine = RequestLoggingEngine()

        def with_evaluation(training_run: Run) -> None:
            training_run.held_out = problems(3)
            training_run.eval_plan = EvaluationPlan("held_out", 2, 1.0, 1.0, 12, (END,), 0)

        scripted_run(tmp_path / "run", "train.eval_every=2", engine=engine, change=with_evaluation)
        assert engine.notes == [
            "load 0",
            "evaluation",
            "batch 1",
            "batch 2",
            "load 1",
            "batch 3",
            "load 2",
            "evaluation",
            "batch 4",
            "load 4",
            "evaluation",
        ]
        assert versions(tmp_path / "run") == [{0}, {0}, {1}, {2}]
        assert [
            row["step"] for row in metrics(tmp_path / "run") if "eval/held_out/accuracy" in row
        ] == [0, 2, 4]

    def test_the_engine_samples_while_the_policy_updates(self, tmp_path: Path):
        """Each side waits for the other: the batch of step 3 for the first update of step 2, and
        that for the batch.
        """
        updating = threading.Event()
        sampling = threading.Event()

        def update(number: int) -> None:
            if number == 3:
                updating.set()
                assert sampling.wait(20)

        engine = WaitingEngine(3, updating, sampling.set)
        scripted_run(tmp_path / "run", engine=engine, policy=CountingPolicy(on_update=update))
        assert len(metrics(tmp_path / "run")) == 4

    def test_nothing_is_generated_for_a_step_that_will_not_happen(self, tmp_path: Path):
        engine = RequestLoggingEngine()
        scripted_run(tmp_path / "run", "train.num_steps=1", engine=engine)
        assert engine.notes == ["load 0", "batch 1", "load 1"]
        assert prefetched_steps(tmp_path / "run") == {"step_000001": None}

    def test_everything_generated_is_accounted_for_and_every_problem_is_met_once(
        self, tmp_path: Path
    ):
        engine = ScriptedEngine(random_script, slots=6)
        state = scripted_run(tmp_path / "run", engine=engine).state
        rows = metrics(tmp_path / "run")
        for row in rows:
            for kind in ("groups", "tokens"):
                assert row[f"rollout/{kind}_generated"] == sum(
                    row[f"rollout/{kind}_{outcome}"] for outcome in COUNTED
                )
        assert state.tokens_generated == sum(row["rollout/tokens_generated"] for row in rows)
        assert sum(row["rollout/groups_excess"] + row["rollout/groups_aborted"] for row in rows) > 0
        assert decided_positions(tmp_path / "run") == list(
            range(len(decided_positions(tmp_path / "run")))
        )

    def test_old_logprobs_are_recorded_by_the_trainer_and_the_samplers_come_along(
        self, tmp_path: Path
    ):
        policy = CountingPolicy()
        scripted_run(
            tmp_path / "run", engine=ScriptedEngine(random_script, logprob=-0.25), policy=policy
        )
        assert len(policy.trained) == 8
        # two of a step: before the first, the policy is pi_old
        for i, minibatch in enumerate(policy.trained):
            for sample in minibatch:
                assert set(sample.engine_logprobs) == {-0.25}
                assert (sample.old_logprobs is None) == (i % 2 == 0)

    def test_the_divergence_is_of_the_policy_that_the_step_begins_with(self, tmp_path: Path):
        policy = CountingPolicy()
        scripted_run(tmp_path / "run", "loss.kl_coef=0.25", "loss.kl_in=reward", policy=policy)
        samples = [sample for minibatch in policy.trained for sample in minibatch]
        assert all(sample.kl == len(sample.response_ids) for sample in samples)
        table = {
            (row["step"], row["group_id"], row["sample"]): row
            for row in trained_rows(tmp_path / "run")
        }
        assert len(table) == len(samples)
        shaped = {(group, i): row["reward"] for (_, group, i), row in table.items()}
        for sample in samples:
            assert sample.reward == shaped[sample.group_id, sample.index] - 0.25 * len(
                sample.response_ids
            )


class TestStaleness:
    def test_it_is_a_mean_over_tokens(self):
        def group(*generations: tuple[int, int]) -> Group:
            made = tuple(
                Generation("", (FILL,) * n, (-1.0,) * n, "stop", version)
                for n, version in generations
            )
            return Group(Problem("0", "", ""), (1,), made, ())

        # 5 tokens of version 3 and 15 of version 2, told at version 3
        found = staleness_metrics([group((5, 3), (10, 2)), group((5, 2))], version=3)
        assert found == {
            "rollout/staleness_mean": 0.75,
            "rollout/staleness_min": 0,
            "rollout/staleness_max": 1,
        }
        assert staleness_metrics([group((0, 1))], version=3) == {}

    @pytest.mark.parametrize("version", [1, 4])
    def test_what_is_beyond_the_bound_is_refused(self, tmp_path: Path, version: int):
        class WrongEngine(CheckedEngine):
            """Returns what no check sees."""

            def poll(self) -> list[Generation]:
                return [replace(each, version=version) for each in super().poll()]

        with pytest.raises(
            EngineError, match=rf"are {3 - version} to {3 - version} steps stale, expected 0 to 1 "
        ):
            scripted_run(
                tmp_path / "run",
                engine=WrongEngine(ScriptedEngine(random_script), vocabulary=10),
                change=self.at_step_3,
            )

    @staticmethod
    def at_step_3(training_run: Run) -> None:
        training_run.state.step = 3
        training_run.state.pending_metrics = None


# --- the trained batches --------------------------------------------------------------------------------------------

CAP = 1.02


class NaiveOneStepOff(MinimalDapo):
    """The schedule as its module describes it, one thing after the other, with a copy of every
    policy.
    """

    def __init__(self, model: Path) -> None:
        super().__init__(*minimal_inputs(model))
        self.policies = [copy.deepcopy(self.model)]  # theta_0, theta_1, ...
        self.weights: list[float] = []

    def step(self, step: int) -> None:
        super().step(step)
        self.policies.append(copy.deepcopy(self.model))

    def sample_batch(self, step: int) -> list[MinimalGroup]:
        trained = self.model
        self.model = self.policies[max(step - 2, 0)]
        groups = super().sample_batch(step)
        with torch.no_grad():
            self.sampler_logprobs = {
                id(g): [self.logprobs(g.prompt, ids) for ids in g.responses] for g in groups
            }
        self.model = trained
        return groups

    def objective(self, group: MinimalGroup, i: int) -> torch.Tensor:
        correction = torch.exp(group.old_logprobs[i] - self.sampler_logprobs[id(group)][i]).clamp(
            max=CAP
        )
        self.weights += correction.tolist()
        return correction * super().objective(group, i)


def test_five_steps_equal_a_naive_sequential_reimplementation(tmp_path: Path, float64_model: Path):
    naive = NaiveOneStepOff(float64_model)
    for step in range(1, STEPS + 1):
        naive.step(step)
    assert min(naive.weights) < 0.99  # the correction has something to do
    assert naive.weights.count(CAP) > 10
    assert sum(weight == 1.0 for weight in naive.weights) >= 30  # the first step is on policy
    changed = [*ONE_STEP_OFF, f"loss.engine_correction={CAP}", "train.threads=1"]
    config = build_config(minimal_config(float64_model).model_dump(), changed)
    run_or_resume(tmp_path / "run", config)
    (file,) = (tmp_path / "run" / "checkpoints" / f"step_{STEPS:06d}").glob("weights*.safetensors")
    real = load_file(file)
    for name, tensor in naive.model.named_parameters():
        torch.testing.assert_close(real[name], tensor.detach(), rtol=0, atol=1e-8)
    dropped = [
        row["rollout/groups_all_wrong"] + row["rollout/groups_all_correct"]
        for row in metrics(tmp_path / "run")
    ]
    assert sum(dropped) == naive.num_dropped > 0


@pytest.mark.parametrize(
    ("cap", "weight", "truncated"),
    [(2.0, 1.5, 0.0), (1.25, 1.25, 1.0)],
)
@pytest.mark.parametrize("minibatch", [2, 4])
def test_each_tokens_loss_is_weighted_by_the_truncated_trainer_to_sampler_ratio(
    tmp_path: Path, cap: float, weight: float, truncated: float, minibatch: int
):
    """A model of zeros gives each of its 197 tokens probability 1/197, and stays so; the sampler
    says 1/295.5.
    """
    model = loaded()
    for parameter in model.model.parameters():
        parameter.data.zero_()
    policy = make_policy(model, loss={"engine_correction": cap})
    engine = ScriptedEngine(random_script, logprob=-math.log(197 * 1.5))
    scripted_run(
        tmp_path / "run",
        f"train.minibatch_groups={minibatch}",
        "train.num_steps=2",
        engine=engine,
        policy=policy,
    )
    for row in metrics(tmp_path / "run"):
        assert row["loss/engine_weight_mean"] == pytest.approx(weight)
        assert row["loss/engine_weight_truncated_fraction"] == truncated
        assert row["loss/ratio_mean"] == pytest.approx(1.0)
        assert row["rollout/engine_logprob_gap_mean"] == pytest.approx(math.log(1.5))


# --- resuming -------------------------------------------------------------------------------------------------------

STEPS_AND_SAVES = ("train.num_steps=5", "train.save_every=1", "train.keep_checkpoints=9")
LAST = "step_000005"


def start_or_resume(
    fork_server: ForkServer, run: Path, *overrides: str, **moment: Any
) -> tuple[int, dict[str, int]]:
    log = run.with_name(f"{run.name}.log")
    return fork_server.run(
        str(run),
        *EVENTFUL,
        *STEPS_AND_SAVES,
        *overrides,
        output=log,
        program="helpers.async_runs:main",
        **moment,
    )


@pytest.fixture(scope="module")
def counted(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, int]]:
    """An uninterrupted run with a checkpoint of every step, and how many calls it made in each
    area.
    """
    run = tmp_path_factory.mktemp("whole") / "run"
    code, calls = start_or_resume(fork_server, run, count=True)
    assert code == 0, run.with_name("run.log").read_text()
    return run, calls


@pytest.fixture(scope="module")
def whole(counted: tuple[Path, dict[str, int]]) -> Path:
    return counted[0]


class TestResuming:
    def test_the_run_has_everything_that_makes_resuming_hard(self, whole: Path):
        rows = metrics(whole)[1:]
        assert min(row["rollout/keep_rate"] for row in rows) < 1
        assert sum(row["rollout/groups_excess"] for row in rows) > 0
        assert [row["rollout/epoch"] for row in rows][-1] >= 2
        assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 1, 1, 1]
        assert prefetched_steps(whole) == {
            f"step_{i:06d}": i + 1 if i < 5 else None for i in range(1, 6)
        }

    @pytest.mark.parametrize("step", [1, 4])
    def test_from_any_step_it_ends_as_the_uninterrupted_run_to_the_byte(
        self, whole: Path, tmp_path: Path, step: int
    ):
        run = tmp_path / "run"
        resumed_from(whole, run, step=step)
        assert differences(contents(run), contents(whole)) == []

    def test_resumed_synchronously_it_samples_the_prefetched_batch_again_and_loses_no_problem(
        self, whole: Path, tmp_path: Path
    ):
        run = tmp_path / "run"
        shutil.copytree(whole, run)
        for step in (3, 4, 5):
            shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
        resume_run(run, ["schedule=sync", "rollout.engines=0", "loss.engine_correction=none"])
        assert versions(run) == [{0}, {0}, {2}, {3}, {4}]
        assert decided_positions(run) == list(range(len(decided_positions(run))))
        assert prefetched_steps(run)["step_000005"] is None

    def test_a_batch_comes_back_from_the_disk_as_it_was(self, tmp_path: Path):
        stream = ProblemStream(problems(8), seed=3)
        for _ in range(6):
            stream.take()
        texts = ("plain", "two\nlines \x00 \ud800 é", "")
        verdicts = (
            Verdict(True, 1.0, answer="7", components={"math": 1.0, "length": -0.1}),
            Verdict(None, 0.0, "timed out \udcff"),
            Verdict(False, -1 / 3),
        )
        # float32 would change the log-probabilities of the second and third response
        generations = tuple(
            with_arrays(
                Generation(
                    f"4/{i}", (5, 2**31 - 1, END)[:i], (-0.1, -1e-300, -math.pi)[:i], finish, 2
                )
            )
            for i, finish in enumerate(("stop", "length", "stop"))
        )
        judged = tuple(
            (
                Group(
                    stream.problem_at(position),
                    (position, 7),
                    generations,
                    verdicts,
                    id=position,
                    texts=texts,
                    rewards=(0.7, None, -1 / 3),
                ),
                outcome,
            )
            for position, outcome in ((2, "trained"), (3, "invalid"), (4, "trained"), (5, "excess"))
        )
        counts = {outcome: i for i, outcome in enumerate(OUTCOMES)}
        batch = Batch((judged[0][0], judged[2][0]), judged, counts, dict(counts), 2, epoch=1)
        batch = replace(batch, prediction=Prediction(3, 0.1 + 0.2, ((1 / 3, True),)))
        sampler = {"kept": 0.1 + 0.2, "decided": 3.0, "errors": [None, ["e", "p", "r"]]}
        prefetched_batch = PrefetchedBatch(batch, SamplingStart(4, 2, sampler))
        write_groups(tmp_path, SavedGroups(prefetched_batch))
        found = read_groups(tmp_path, stream).prefetched
        assert found == prefetched_batch
        assert found.batch.groups[0].rewards == (0.7, None, -1 / 3)
        assert [g.logprobs.typecode for g in found.batch.groups[0].generations] == ["f", "d", "d"]
        # answers and components do not count in a verdict's equality
        assert found.batch.judged[0][0].verdicts[0].answer == "7"
        assert found.batch.judged[3][0].verdicts[0].components == {"math": 1.0, "length": -0.1}
        with pytest.raises(CheckpointError, match="resume with the data the run began with"):
            read_groups(tmp_path, ProblemStream(problems(8), seed=4))

    def test_a_problem_whose_id_utf8_cannot_hold_is_found_again(self, tmp_path: Path) -> None:
        stream = ProblemStream([Problem("lone \ud800", "?", "")], seed=3)
        generation = with_arrays(Generation("4/0/0", (5, END), (-0.5, -0.25), "stop", 2))
        verdicts = (Verdict(True, 1.0),)
        group = Group(stream.problem_at(0), (1, 7), (generation,), verdicts, 0, ("a",), (1.0,))
        counts = dict.fromkeys(OUTCOMES, 1)
        batch = Batch((group,), ((group, "trained"),), counts, counts, 0)
        write_groups(tmp_path, SavedGroups(PrefetchedBatch(batch, SamplingStart(4, 1, {}))))
        (found,) = read_groups(tmp_path, stream).prefetched.batch.groups
        assert found.problem.id == "lone \ud800"
        other = ProblemStream([Problem("another", "?", "")], seed=3)
        with pytest.raises(CheckpointError, match="resume with the data the run began with"):
            read_groups(tmp_path, other)

    def test_arrays_come_back_as_arrays_bit_by_bit_at_four_bytes_a_number(
        self, tmp_path: Path
    ) -> None:
        stream = ProblemStream(problems(40), seed=3)
        tokens = array("i", range(1000))
        logprobs = array("f", [-0.1, -1e-38, -0.0, -math.pi] * 250)
        generations = tuple(
            Generation(f"4/{i}", tokens[:n], logprobs[:n], "stop", 2)
            for i, n in enumerate((1000, 0, 3))
        )
        verdicts = (Verdict(True, 1.0), Verdict(False, -1.0), Verdict(None, 0.0, "timed out"))
        judged = tuple(
            (
                Group(
                    stream.problem_at(i),
                    (i, 7),
                    generations,
                    verdicts,
                    i,
                    ("a", "b", "c"),
                    (1.0, -1.0, None),
                ),
                "trained" if i % 2 else "all_wrong",
            )
            for i in range(40)
        )
        counts = dict.fromkeys(OUTCOMES, 20)
        batch = Batch(
            tuple(group for group, outcome in judged if outcome == "trained"),
            judged,
            counts,
            counts,
            0,
        )
        write_groups(tmp_path, SavedGroups(PrefetchedBatch(batch, SamplingStart(4, 2, {}))))
        found = read_groups(tmp_path, stream).prefetched
        assert found == PrefetchedBatch(batch, SamplingStart(4, 2, {}))
        for group, _ in found.batch.judged:
            for own, other in zip(group.generations, generations, strict=True):
                assert (own.token_ids.typecode, own.logprobs.typecode) == ("i", "f")
                assert (own.token_ids.tobytes(), own.logprobs.tobytes()) == (
                    other.token_ids.tobytes(),
                    other.logprobs.tobytes(),
                )

    def test_a_file_of_an_earlier_version_with_64_bits_a_number_comes_back_as_arrays(
        self, tmp_path: Path
    ) -> None:
        """An engine's tuples were stored as float64, whether float32 would have changed them or
        not.
        """
        stream = ProblemStream(problems(4), seed=3)
        generation = with_arrays(Generation("4/0/0", (5, END), (-0.5, -0.25), "stop", 2))
        verdicts = (Verdict(True, 1.0),)
        group = Group(stream.problem_at(1), (1, 7), (generation,), verdicts, 1, ("a",), (1.0,))
        counts = dict.fromkeys(OUTCOMES, 1)
        batch = Batch((group,), ((group, "trained"),), counts, counts, 0)
        prefetched = PrefetchedBatch(batch, SamplingStart(4, 1, {}))
        write_groups(tmp_path, SavedGroups(prefetched))
        path = tmp_path / "prefetched_batch.parquet"
        table = read_table(path)
        logprobs = table["logprobs"].cast(pa.list_(pa.float64()))
        write_table(
            table.set_column(table.column_names.index("logprobs"), "logprobs", logprobs), path
        )
        found = read_groups(tmp_path, stream).prefetched
        assert found == prefetched
        assert found.batch.groups[0].generations[0].logprobs.typecode == "f"


KILLS = int(os.environ.get("DAPO_KILLS", "6"))
SAVES = ("train.save_every=2", "train.keep_checkpoints=2")


def test_killed_at_random_moments_and_resumed_it_ends_as_if_nothing_had_happened(
    fork_server: ForkServer, counted: tuple[Path, dict[str, int]], tmp_path: Path
):
    whole, calls = counted
    expected = contents(whole, checkpoints=LAST)
    chance = random.Random(0)
    areas = [area for area in AREAS if area not in ("start", "judging") and calls.get(area)]
    run = tmp_path / "run0"
    kills = 0
    is_ended = False
    while kills < KILLS or not is_ended:
        moment: dict[str, Any] = {}
        if kills < KILLS:
            area = areas[kills % len(areas)]
            moment = {
                "area": area,
                # a resumed run makes fewer
                "calls": chance.randint(1, max(2, int(0.5 * calls[area]))),
                "signals": [(0.01 * chance.random(), signal.SIGKILL)],
            }
        code, _ = start_or_resume(fork_server, run, *SAVES, **moment)
        assert code in (0, -signal.SIGKILL), run.with_name(f"{run.name}.log").read_text()[-3000:]
        is_ended = code == 0
        kills += not is_ended
        if is_ended:
            assert differences(contents(run, checkpoints=LAST), expected) == []
            assert not list(run.rglob("*.tmp"))
            run = tmp_path / f"run{kills}"


def test_a_signal_to_the_process_saves_and_loses_nothing(
    fork_server: ForkServer, counted: tuple[Path, dict[str, int]], tmp_path: Path
):
    whole, calls = counted
    run = tmp_path / "run"
    moment = {"area": "update", "calls": calls["update"] // 2, "signals": [(0, signal.SIGTERM)]}
    code, _ = start_or_resume(fork_server, run, **moment)
    printed = (tmp_path / "run.log").read_text()
    assert code == 143, printed
    assert printed.endswith("stopped by SIGTERM\n")
    assert "Traceback" not in printed
    run_or_resume(run, load_config(run / "config.yaml"))
    assert differences(contents(run, checkpoints=LAST), contents(whole, checkpoints=LAST)) == []


# --- what fails -----------------------------------------------------------------------------------------------------


def wait_for_thread(step: int) -> None:
    for thread in threading.enumerate():
        if thread.name == f"dapo-batch-{step}_0":
            thread.join(20)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripted") / "undisturbed"
    scripted_run(path)
    return path


class TestFailures:
    """Two updates a step: those of step 2 are the third and the fourth."""

    def assert_resumes_to(self, run: Path, undisturbed: Path) -> None:
        scripted_run(run)
        last = "step_000004"
        assert (
            differences(contents(run, checkpoints=last), contents(undisturbed, checkpoints=last))
            == []
        )

    def test_sampling_that_fails_before_the_first_update_undoes_the_step(
        self, undisturbed: Path, tmp_path: Path
    ):
        run = tmp_path / "run"
        at_once = threading.Event()
        at_once.set()

        def wait(updates: int) -> None:
            if updates == 2:
                wait_for_thread(3)

        with pytest.raises(EngineError, match="the engine is gone"):
            scripted_run(
                run,
                engine=WaitingEngine(3, at_once, gone),
                policy=CountingPolicy(before_updates=wait),
            )
        assert prefetched_steps(run) == {"step_000001": 2}
        assert [row["step"] for row in metrics(run)] == [1]
        self.assert_resumes_to(run, undisturbed)

    def test_sampling_that_fails_after_an_update_costs_the_batch_and_not_the_step(
        self, tmp_path: Path
    ):
        run = tmp_path / "run"
        updating = threading.Event()

        def update(number: int) -> None:
            if number == 4:
                updating.set()

        with pytest.raises(EngineError, match="the engine is gone"):
            scripted_run(
                run,
                engine=WaitingEngine(3, updating, gone),
                policy=CountingPolicy(on_update=update),
            )
        assert prefetched_steps(run) == {"step_000002": None}
        scripted_run(run)
        assert versions(run) == [{0}, {0}, {2}, {2}]
        rows = metrics(run)
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 0, 1]
        assert (run / "checkpoints/step_000004/updates").read_text() == "8"

    @pytest.mark.parametrize(("number", "kept"), [(3, {"step_000001": 2}), (4, {})])
    def test_an_update_that_fails_cancels_the_sampling(
        self, undisturbed: Path, tmp_path: Path, number: int, kept: dict[str, int]
    ):
        """Before the first update of a step was made the step is undone, afterwards nothing of it
        can be kept.
        """
        run = tmp_path / "run"

        def update(made: int) -> None:
            if made == number:
                raise NumericsError("the gradient norm was not finite")

        with pytest.raises(NumericsError):
            scripted_run(
                run,
                engine=UnresponsiveEngine(random_script),
                policy=CountingPolicy(on_update=update),
            )
        assert (prefetched_steps(run) if (run / "checkpoints").exists() else {}) == kept
        if kept:
            self.assert_resumes_to(run, undisturbed)

    def test_three_steps_without_groups_stop_a_run_and_the_last_is_sampled_again(
        self, tmp_path: Path
    ):
        def hopeless(request: GenerationRequest) -> tuple[list[int], str]:
            return (
                ([WRONG, END], "stop")
                if request.id[:2] in ("2/", "3/", "4/")
                else random_script(request)
            )

        run = tmp_path / "run"
        for _ in range(2):  # what was too little stays so, until the options or the data are others
            with pytest.raises(
                ShortfallError, match=r"step 4: nothing to learn from, in 40 groups: 40 all wrong"
            ):
                scripted_run(run, engine=ScriptedEngine(hopeless))
            assert prefetched_steps(run) == {"step_000003": None}
            assert len(read_table(run / "rollouts/step_000004.parquet")) == 160
        scripted_run(run)
        assert [row.get("rollout/staleness_max") for row in metrics(run)] == [0, None, None, 0]
        assert decided_positions(run) == list(range(len(decided_positions(run))))

    def test_a_batch_of_solved_problems_ends_the_run_well_and_goes_back(self, tmp_path: Path):
        def easy(request: GenerationRequest) -> tuple[list[int], str]:
            return ([RIGHT, END], "stop") if request.id.startswith("3/") else random_script(request)

        run = tmp_path / "run"
        for _ in range(2):
            assert scripted_run(run, engine=ScriptedEngine(easy)).is_solved
            assert prefetched_steps(run) == {"step_000002": None}
            assert [row["step"] for row in metrics(run)] == [1, 2]

    @pytest.mark.parametrize(("moment", "saved"), [("before", 1), ("during", 2)])
    def test_a_signal_takes_effect_before_the_first_update_or_with_the_next_batch(
        self, undisturbed: Path, tmp_path: Path, moment: str, saved: int
    ):
        run = tmp_path / "run"
        policy = CountingPolicy()
        go_on = threading.Event()

        def with_signal(training_run: Run) -> None:
            def signal_comes(updates: int) -> None:
                if updates == (2 if moment == "before" else 3):
                    training_run.stop.signum = signal.SIGTERM
                    go_on.set()

            policy.before_updates = signal_comes if moment == "before" else policy.before_updates
            policy.on_update = signal_comes if moment == "during" else policy.on_update

        with pytest.raises(Interrupted):
            scripted_run(run, engine=WaitingEngine(3, go_on), policy=policy, change=with_signal)
        assert prefetched_steps(run) == {f"step_{saved:06d}": saved + 1}
        assert [row["step"] for row in metrics(run)] == list(range(1, saved + 1))
        self.assert_resumes_to(run, undisturbed)


# --- options --------------------------------------------------------------------------------------------------------


class TestOptions:
    def test_it_needs_an_engine_in_a_process_of_its_own(self):
        with pytest.raises(ConfigError, match=r"its own process; set rollout.engines=1"):
            tiny("schedule=one_step_off")
        # which always has one
        assert tiny("schedule=one_step_off", "rollout.engine=vllm").rollout.engines == 0

    def test_it_corrects_by_itself_and_takes_no_for_an_error(self, tmp_path: Path):
        assert tiny().loss.engine_correction is None
        config = tiny(*ONE_STEP_OFF)
        assert config.loss.engine_correction == 2.0
        assert tiny(*ONE_STEP_OFF, "loss.engine_correction=5").loss.engine_correction == 5.0
        with pytest.raises(
            ConfigError,
            match=(
                r"1 steps old, which loss.engine_correction=none leaves uncorrected; set"
                r" loss.engine_correction=tis"
            ),
        ):
            tiny(*ONE_STEP_OFF, "loss.engine_correction=none")
        (tmp_path / "dumped.yaml").write_text(dump_config(config))
        assert load_config(tmp_path / "dumped.yaml") == config

    def test_check_says_so(self):
        summary = "\n".join(explain(Config.model_validate(tiny(*ONE_STEP_OFF).model_dump())))
        assert "loss is multiplied by min(pi_old / pi_sampler, 2)" in summary
        assert "schedule: async (paper: sync)" in summary
        assert "max_staleness 1: every token but the first batch's is 1 step stale" in summary
        assert "loss.engine_correction: 2 (paper: none)" in summary


def test_an_engine_in_its_own_process_trains_as_one_in_a_thread(
    fork_server: ForkServer, tmp_path: Path
):
    steps = (
        "train.num_steps=2",
        "train.save_every=1",
        "train.eval_every=2",
        "train.keep_checkpoints=9",
    )
    run_or_resume(tmp_path / "thread", async_config(*steps))
    run = tmp_path / "process"
    log = tmp_path / "log"
    options = ("train.threads=1", *ONE_STEP_OFF, *steps)
    code, _ = fork_server.run(
        "train", str(CONFIGS / "tiny.yaml"), *options, "--run-dir", str(run), output=log
    )
    assert code == 0, log.read_text()
    assert differences(contents(run), contents(tmp_path / "thread")) == []
