"""Laws of engines in processes: what a run computes does not depend on them, nor on how often one
of them is lost.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.scripted_engine import cut
from dapo.analysis.check.summary import ignored_options
from dapo.cli.train import start_run
from dapo.config import Config
from dapo.core.errors import EngineError, OutOfMemory, WorkerDied
from dapo.core.rng import keyed_seed
from dapo.distributed.engine_pool import EnginePool
from dapo.distributed.engine_specs import engine_specs, engine_threads, gpu_assignments
from dapo.distributed.local import LocalWorker
from dapo.distributed.protocol import Node, WorkerSpec
from dapo.engines.checked import CheckedEngine
from dapo.engines.engine import RolloutEngine
from dapo.libs.cpu_kernels import is_compiled
from dapo.policy.builtin_models import TINY_VOCABULARY
from dapo.start.evaluate import EvalRequest, evaluate_model
from dapo.training.train import train
from dapo.types import Generation, GenerationRequest
from helpers.fake_engines import VOCABULARY, keyed_script
from helpers.launchers import SHARED_WORKERS, LightLauncher, SharedWorkerLauncher, engine_spec
from helpers.processes import is_alive
from helpers.tiny_runs import contents, differences, new_run, tiny

pytestmark = pytest.mark.usefixtures("forked_workers")


class EmptyWeights:
    """A source of weights for engines that look at none."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LightLauncher]:
    launcher = LightLauncher(tmp_path / "logs")
    yield launcher
    launcher.close()


def pool(
    launcher: LightLauncher, *specs: WorkerSpec, messages: list[str] | None = None, **options: Any
) -> EnginePool:
    return EnginePool(
        launcher, specs, log=[].append if messages is None else messages.append, **options
    )


def request(name: str, *, prompt: int = 1, **options: Any) -> GenerationRequest:
    limit = options.pop("max_new_tokens", 1 + keyed_seed("limit", name) % 9)
    return GenerationRequest(
        name, (prompt, 2), limit, 1.0, 1.0, keyed_seed("draw", name), (), **options
    )


def group(number: int, size: int = 3) -> list[GenerationRequest]:
    return [request(f"{number}/{i}", prompt=number) for i in range(size)]


def drain(engine: RolloutEngine, count: int) -> list[Generation]:
    done: list[Generation] = []
    while len(done) < count:
        done += engine.poll()
    return done


# --- the protocol


def test_groups_go_whole_to_the_engine_with_least_to_do(launcher: LightLauncher) -> None:
    """An engine of one slot serves one after the other: who shares an engine shows in when an
    answer comes.
    """
    engine = pool(launcher, *[engine_spec("scripted", slots=1)] * 2)
    engine.submit(
        [request(f"{n}/{i}", prompt=n, max_new_tokens=1) for n in (1, 2, 3) for i in range(2)]
    )
    came = [[g.request_id for g in engine.poll()] for _ in range(4)]
    assert came == [["1/0", "2/0"], ["1/1", "2/1"], ["3/0"], ["3/1"]]
    engine.submit([request("4/0", prompt=4, max_new_tokens=3)])
    engine.submit([request("5/0", prompt=5, max_new_tokens=1)])
    engine.submit([request("6/0", prompt=6, max_new_tokens=1)])
    assert [g.request_id for g in engine.poll()] == ["5/0"]
    engine.submit([request("7/0", prompt=7, max_new_tokens=1)])
    # 4 and 6 share the first engine, so 7 went to the second
    assert [g.request_id for g in engine.poll()] == ["7/0"]
    assert [g.request_id for _ in range(2) for g in engine.poll()] == ["4/0", "6/0"]


def test_a_request_that_continues_another_goes_to_the_engine_that_answered_it(
    launcher: LightLauncher,
) -> None:
    """Engines of one slot: two requests on one engine are answered one after the other."""
    engine = pool(launcher, *[engine_spec("scripted", slots=1)] * 2)

    def turn(name: str, previous: str, prompt: int) -> GenerationRequest:
        return request(name, prompt=prompt, max_new_tokens=1, previous=previous)

    def answers(*requests: GenerationRequest) -> list[list[str]]:
        engine.submit(requests)
        came = [[g.request_id for g in engine.poll()] for _ in requests]
        return [found for found in came if found]

    engine.submit(
        [request("a", prompt=1, max_new_tokens=1), request("b", prompt=2, max_new_tokens=9)]
    )
    assert [g.request_id for g in engine.poll()] == ["a"]
    assert [g.request_id for g in engine.abort(["b"])] == ["b"]
    assert answers(turn("a1", "a", 3), turn("a2", "a", 4)) == [["a1"], ["a2"]]
    assert answers(turn("b1", "b", 3), turn("b2", "b", 3)) == [["b1"], ["b2"]]
    # equal prompts of different engines
    assert answers(turn("a3", "a2", 3), turn("b3", "b2", 3)) == [["a3", "b3"]]
    assert answers(turn("c", "unknown", 3), turn("d", "unknown", 4)) == [["c", "d"]]
    for worker in list(launcher.running.values()):
        kill(worker.pid)
    assert answers(turn("a4", "a3", 3), turn("a5", "a3", 4)) == [["a4"], ["a5"]]
    assert engine.restarts == 1  # engine-1 has nothing to do
    engine.load_weights(EmptyWeights(), 1)
    assert answers(turn("a6", "a5", 3), turn("a7", "a5", 4)) == [["a6", "a7"]]


def test_the_memory_of_who_answered_is_bounded(
    launcher: LightLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo.distributed.engine_pool.REMEMBERED_ANSWERS", 3)
    engine = pool(launcher, *[engine_spec("scripted")] * 2)
    for number in range(4):
        engine.submit([request(f"{number}", prompt=number, max_new_tokens=1)])
        drain(engine, 1)
    # request 0, which engine-0 answered, is forgotten; engine-0 has less to do than engine-1 after
    # "long" there
    engine.submit([request("busy", prompt=9, max_new_tokens=9)])
    engine.submit([request("known", prompt=8, max_new_tokens=9, previous="1")])
    engine.submit([request("forgotten", prompt=7, max_new_tokens=9, previous="0")])
    assert list(engine.in_flight) == ["busy", "known", "forgotten"]
    owners = [engine._owner[name].name for name in engine.in_flight]
    assert owners == ["engine-0", "engine-0", "engine-1"]


def test_what_one_engine_refuses_is_queued_at_none(launcher: LightLauncher) -> None:
    engine = pool(launcher, *[engine_spec("scripted")] * 2)
    with pytest.raises(EngineError, match="'bad': max_new_tokens must be at least 1, got 0"):
        engine.submit([*group(1), request("bad", prompt=2, max_new_tokens=0)])
    assert engine.poll() == []
    engine.load_weights(EmptyWeights(), 1)
    engine.submit(group(1))
    assert {g.version for g in drain(engine, 3)} == {1}


def test_an_engine_that_breaks_down_is_an_error_and_no_loss(launcher: LightLauncher) -> None:
    engine = pool(launcher, engine_spec("FailingEngine"))
    engine.submit(group(1))
    with pytest.raises(
        EngineError, match="engine-0 failed with 3 requests in flight: ZeroDivisionError: by zero"
    ):
        engine.poll()
    assert launcher.starts == 1


def test_an_engine_that_finds_no_memory_is_named_with_the_option_to_lower(
    launcher: LightLauncher,
) -> None:
    engine = pool(launcher, engine_spec("FullEngine"))
    engine.submit(group(1))
    words = (
        r"generation ran out of memory \(1\.50 GiB were requested\): lower rollout\.native\.slots"
    )
    with pytest.raises(OutOfMemory, match=words):
        engine.poll()
    assert launcher.starts == 1


def test_a_slow_engine_delays_no_other_where_answers_may_come_in_any_order(
    launcher: LightLauncher,
) -> None:
    engine = pool(
        launcher,
        engine_spec("SlowPollEngine", seconds=0.5),
        engine_spec("scripted"),
        reproducible=False,
    )
    engine.submit(
        [request("slow", prompt=1, max_new_tokens=1), request("quick", prompt=2, max_new_tokens=9)]
    )
    assert [g.request_id for g in drain(engine, 2)] == ["quick", "slow"]
    engine.submit(
        [request("slow", prompt=1, max_new_tokens=9), request("quick", prompt=2, max_new_tokens=9)]
    )
    while not (found := engine.poll()):
        pass
    assert found[0].request_id == "quick"
    stopped = engine.abort(["slow"])  # waits for the poll that is under way
    assert (stopped[0].finish, len(stopped[0].token_ids) < 9) == ("aborted", True)


def test_one_message_covers_the_steps_of_a_tenth_of_a_second_unless_a_request_ends(
    launcher: LightLauncher,
) -> None:
    engine = pool(launcher, engine_spec("SlowPollEngine", seconds=0.001), reproducible=False)
    engine.submit([request("long", max_new_tokens=30), request("short", max_new_tokens=2)])
    came: list[list[str]] = []
    while sum(map(len, came)) < 2:
        came.append([generation.request_id for generation in engine.poll()])
    assert came[0] == ["short"]
    assert came[-1] == ["long"]
    assert len(came) < 10


class FailsToUnpickle:
    """Can be sent, and not be received."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return int, ("no number",)


def test_a_call_that_cannot_be_read_ends_the_process_instead_of_waiting_for_ever(
    launcher: LightLauncher,
) -> None:
    worker = launcher.start(["one"], [engine_spec("scripted")])[0]
    with pytest.raises(
        WorkerDied, match=r"one exited with code 1; .*invalid literal for int\(\) .*'no number'"
    ):
        worker.call("poll", FailsToUnpickle()).result(30)


def test_closing_ends_the_processes(launcher: LightLauncher) -> None:
    engine = pool(launcher, *[engine_spec("scripted")] * 2)
    engine.submit(group(1))
    engine.close()
    engine.close()
    assert not any(is_alive(worker.pid) for worker in launcher.running.values())
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.poll()


def test_ctrl_c_interrupts_a_poll_and_closing_does_not_wait(launcher: LightLauncher) -> None:
    engine = pool(launcher, engine_spec("SlowPollEngine", seconds=60.0))
    engine.submit(group(1))
    started = time.monotonic()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        engine.poll()
    engine.close()
    assert time.monotonic() - started < 50  # less than the minute of the poll
    assert not is_alive(launcher.running["engine-0"].pid)


@pytest.mark.parametrize("shares_gpus", [False, True])
def test_engines_that_share_a_gpu_with_a_trainer_give_their_weights_up_until_the_next_come(
    launcher: LightLauncher, shares_gpus: bool
) -> None:
    engine = pool(launcher, *[engine_spec("DroppingEngine")] * 2, shares_gpus=shares_gpus)
    engine.load_weights(EmptyWeights(), 1)
    engine.drop_weights()
    if shares_gpus:
        with pytest.raises(EngineError, match="weights are incomplete"):
            engine.submit(group(1))
        kill(launcher.running["engine-0"].pid)  # its replacement has nothing to replay
    engine.load_weights(EmptyWeights(), 2)
    engine.submit([*group(1, 1), *group(2, 1)])
    drops = {tuple(generation.token_ids) for generation in drain(engine, 2)}
    assert drops == ({(0,), (1,)} if shares_gpus else {(0,)})


# --- losses


def play(
    engine: RolloutEngine, seed: int, *, before_call: Callable[[int], None] = lambda n: None
) -> list[Any]:
    """A random program of calls, and everything that came of it; `before_call` may do harm."""
    rng = random.Random(seed)
    came: list[Any] = []
    in_flight: list[str] = []
    for number in range(60):
        before_call(number)
        action = rng.choice(["submit", "poll", "poll", "poll", "abort"])
        if number in (0, 30):
            came += engine.abort(in_flight)
            in_flight.clear()
            engine.load_weights(EmptyWeights(), number + 1)
        elif action == "submit":
            requests = group(number, rng.randint(1, 4))
            engine.submit(requests)
            in_flight += [r.id for r in requests]
        elif action == "abort":
            names = rng.sample(in_flight, len(in_flight) // 3)
            came += engine.abort(names)
            in_flight = [name for name in in_flight if name not in names]
        else:
            found = engine.poll()
            came += found
            in_flight = [name for name in in_flight if name not in {g.request_id for g in found}]
        came.append(f"call {number}")
    return came + drain(engine, len(in_flight))


class EngineKiller:
    """Kills a random engine before each of the calls of those numbers."""

    def __init__(
        self, launcher: LightLauncher | SharedWorkerLauncher, seed: int, calls: Sequence[int]
    ) -> None:
        self._launcher = launcher
        self._calls = calls
        self._rng = random.Random(seed)

    def __call__(self, number: int) -> None:
        if number in self._calls:
            kill(self._launcher.running[self._rng.choice(sorted(self._launcher.running))].pid)


def kill(pid: int) -> None:
    """Unless nobody has noticed the last time yet."""
    if is_alive(pid):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("engines", [1, 3])
def test_killed_engines_change_neither_answers_nor_their_order(
    launcher: LightLauncher, engines: int
) -> None:
    """These engines' log-probabilities depend on every call that was made on them."""
    specs = [engine_spec("HistoryDependentEngine", slots=3)] * engines
    messages = list[str]()
    for seed in (0, 1):
        expected = play(pool(launcher, *specs), seed)
        assert len(expected) > 80
        launcher.running.clear()
        calls = random.Random(seed).sample(range(60), 5)
        with_faults = pool(launcher, *specs, messages=messages)
        assert play(with_faults, seed, before_call=EngineKiller(launcher, seed, calls)) == expected
    assert 6 <= len(messages) <= 10  # one that is not needed any more before the end is not missed
    assert launcher.starts == 4 * engines + len(messages)
    assert "engine-0 was ended by SIGKILL; engine-0 is replaced (1 of at most 10 times)" in messages


@pytest.mark.parametrize(
    ("engine", "reproducible"), [("scripted", False), ("UnreproducibleEngine", True)]
)
def test_engines_of_varying_speed_answer_every_request_once_with_its_own_tokens(
    launcher: LightLauncher, engine: str, reproducible: bool
) -> None:
    answered = pool(launcher, *[engine_spec(engine)] * 2, reproducible=reproducible)
    inject_fault = EngineKiller(launcher, 0, [4, 9, 17, 30, 41, 50])
    requests = {r.id: r for number in range(60) for r in group(number, 4)}
    came = play(CheckedEngine(answered, vocabulary=VOCABULARY), 3, before_call=inject_fault)
    found = [generation for generation in came if isinstance(generation, Generation)]
    for generation in found:
        asked = requests[generation.request_id]
        tokens, finish = cut(asked, *keyed_script()(asked))
        found_tokens = tuple(generation.token_ids)
        assert found_tokens == tokens[: len(found_tokens)]
        assert generation.finish == "aborted" or (generation.finish, found_tokens) == (
            finish,
            tokens,
        )
    assert len({generation.request_id for generation in found}) == len(found) > 10
    assert answered.restarts >= 3


def test_an_engine_that_hangs_is_replaced(launcher: LightLauncher, tmp_path: Path) -> None:
    messages: list[str] = []
    stuck = engine_spec("HangingEngine", mark=str(tmp_path / "mark"))
    engine = pool(launcher, stuck, engine_spec("scripted"), messages=messages, call_timeout_s=1.0)
    requests = [r for number in range(4) for r in group(number)]
    engine.submit(requests)
    first = launcher.running["engine-0"]
    found = {g.request_id: g.token_ids for g in drain(engine, 12)}
    assert found == {r.id: cut(r, *keyed_script()(r))[0] for r in requests}
    assert messages[0].startswith("engine-0 gave no answer within 1 s")
    assert not is_alive(first.pid)


def test_an_engine_that_fails_to_load_a_later_version_is_replaced_and_the_step_goes_on(
    launcher: LightLauncher, tmp_path: Path
) -> None:
    messages: list[str] = []
    failing = engine_spec("UnloadableEngine", mark=str(tmp_path / "mark"))
    engine = pool(launcher, failing, engine_spec("scripted"), messages=messages)
    engine.load_weights(EmptyWeights(), 1)
    first = launcher.running["engine-0"]
    engine.load_weights(EmptyWeights(), 2)
    [message] = messages
    assert (
        "did not load the weights of version 2: the device refuses; engine-0 is replaced (1 of"
        in message
    )
    assert not is_alive(first.pid)
    requests = [r for number in range(2) for r in group(number)]
    engine.submit(requests)
    assert {generation.version for generation in drain(engine, len(requests))} == {2}


@pytest.mark.parametrize(("fails_from", "restarts"), [(1, 0), (2, 1)])
def test_an_engine_that_never_loads_a_version_is_an_error_after_one_replacement(
    launcher: LightLauncher, fails_from: int, restarts: int
) -> None:
    engine = pool(launcher, engine_spec("UnloadableEngine", first=fails_from))
    for version in range(1, fails_from):
        engine.load_weights(EmptyWeights(), version)
    with pytest.raises(EngineError, match="the device refuses"):
        engine.load_weights(EmptyWeights(), fails_from)
    assert engine.restarts == restarts


class DyingReplacementsLauncher(LightLauncher):
    """The first three processes that it starts in the place of others are killed while they catch
    up.
    """

    deaths = 0

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[LocalWorker]:
        is_replacement = bool(self.running)
        workers = super().start(names, specs, together=together)
        if is_replacement and self.deaths < 3:
            self.deaths += 1
            kill(workers[0].pid)
        return workers


def test_engines_that_are_lost_together_and_again_during_replay_are_replaced(
    tmp_path: Path,
) -> None:
    launcher = DyingReplacementsLauncher(tmp_path)
    messages = list[str]()

    def all_die(number: int) -> None:
        if number == 55:
            for worker in launcher.running.values():
                kill(worker.pid)

    made = [engine_spec("HistoryDependentEngine", slots=2)] * 2
    expected = play(pool(launcher, *made), 5)
    launcher.running.clear()
    assert play(pool(launcher, *made, messages=messages), 5, before_call=all_die) == expected
    assert len(messages) == 2 + 3
    launcher.close()


def test_beyond_the_limit_a_loss_is_an_error_with_the_exit_reason(launcher: LightLauncher) -> None:
    engine = pool(launcher, engine_spec("scripted"), max_restarts=1)
    engine.submit(group(1))
    EngineKiller(launcher, 0, [0])(0)
    engine.poll()
    EngineKiller(launcher, 0, [0])(0)
    with pytest.raises(
        EngineError,
        match=(
            r"engine-0 was ended by SIGKILL.*: 1 engines have been replaced in this run, of at"
            r" most 1"
        ),
    ):
        drain(engine, 3)


# --- whole runs


class HookedEngine:
    """An engine with something that happens before each poll."""

    def __init__(self, engine: EnginePool, inject_fault: Callable[[int], None]) -> None:
        self._engine = engine
        self._inject_fault = inject_fault
        self._polls = 0
        self.drop_weights = engine.drop_weights
        self.load_weights = engine.load_weights
        self.submit = engine.submit
        self.abort = engine.abort
        self.close = engine.close

    def poll(self) -> list[Generation]:
        self._inject_fault(self._polls)
        self._polls += 1
        return self._engine.poll()


def trained(
    path: Path,
    config: Config,
    engine: EnginePool,
    inject_fault: Callable[[int], None] = lambda n: None,
) -> Path:
    """A run with this engine in the place of its own."""
    with new_run(config, path) as training_run:
        training_run.sampling.engine = CheckedEngine(
            HookedEngine(engine, inject_fault), vocabulary=len(TINY_VOCABULARY)
        )
        try:
            train(training_run)
        finally:
            engine.close()
    return path


# dynamic sampling with excess, aborted groups, two updates a step, an evaluation between
KERNELS = "{layers: compiled}" if is_compiled() else "{}"
OPTIONS = (
    "train.num_steps=3",
    "train.save_every=0",
    "train.eval_every=2",
    "rollout.native.slots=8",
    "train.threads=1",
    # of all runs the same, also where no start of a run resolves it
    f"rollout.native.kernels={KERNELS}",
)


def test_killed_at_any_poll_of_a_step_the_run_ends_as_if_nothing_had_happened(
    launcher: LightLauncher, tmp_path: Path
) -> None:
    config = tiny(*OPTIONS)
    specs = [engine_spec("HistoryDependentEngine", slots=4, vocabulary=len(TINY_VOCABULARY))] * 2
    polls: list[int] = []
    trained(tmp_path / "whole", config, pool(launcher, *specs), polls.append)
    expected = contents(tmp_path / "whole")
    rng = random.Random(0)
    messages = list[str]()
    for number in range(2):
        launcher.running.clear()
        engine = pool(launcher, *specs, messages=messages)
        inject_fault = EngineKiller(launcher, number, rng.sample(polls, 3))
        trained(tmp_path / f"{number}", config, engine, inject_fault)
        assert differences(contents(tmp_path / f"{number}"), expected) == []
    assert len(messages) >= 3


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run holds whose engine is where it trains."""
    run = tmp_path_factory.mktemp("in_process") / "run"
    start_run(tiny(*OPTIONS), run_dir=run, config_name="tiny")
    return contents(run)


def test_a_run_with_an_engine_process_is_the_run_in_one_process_to_the_byte(
    tmp_path: Path, in_process: dict[str, Any]
) -> None:
    start_run(tiny(*OPTIONS, "rollout.engines=1"), run_dir=tmp_path / "run", config_name="tiny")
    assert differences(contents(tmp_path / "run"), in_process) == []
    assert (tmp_path / "run" / "logs" / "engine-0.log").exists()


def natively(
    path: Path, *, engines: int, inject_fault: Callable[[int], None] = lambda n: None
) -> dict[str, Any]:
    """What a run holds that is sampled by native engines in other processes."""
    SHARED_WORKERS.release_all()
    specs = engine_specs(tiny(*OPTIONS, f"rollout.engines={engines}"))
    return contents(
        trained(path, tiny(*OPTIONS), EnginePool(SHARED_WORKERS, specs, log=print), inject_fault)
    )


def test_a_native_engine_killed_in_the_middle_of_a_step_changes_nothing(
    tmp_path: Path, in_process: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    SHARED_WORKERS.warm_up(2)
    assert (
        differences(
            natively(
                tmp_path / "run", engines=1, inject_fault=EngineKiller(SHARED_WORKERS, 0, [25])
            ),
            in_process,
        )
        == []
    )
    assert "engine-0 is replaced (1 of at most 10 times)" in capsys.readouterr().out


def test_a_run_with_two_engines_repeats_itself(tmp_path: Path) -> None:
    first = natively(tmp_path / "a", engines=2)
    assert differences(natively(tmp_path / "b", engines=2), first) == []


def test_beyond_the_limit_the_run_saves_its_state_and_ends_with_a_plain_sentence(
    launcher: LightLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def second_step(number: int) -> None:
        if (run / "rollouts" / "step_000001.parquet").exists():
            kill(launcher.running["engine-0"].pid)

    engine = pool(
        launcher,
        engine_spec("HistoryDependentEngine", slots=4, vocabulary=len(TINY_VOCABULARY)),
        max_restarts=0,
    )
    with pytest.raises(EngineError, match=r"engine-0 was ended by SIGKILL.*of at most 0") as error:
        trained(run, tiny(*OPTIONS), engine, second_step)
    assert error.value.exit_code == 1
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
    assert f"saved: step 1 of 3; continue with: dapo resume {run}\n" in capsys.readouterr().out


def test_an_evaluation_by_two_engines_agrees_with_one_in_process(tmp_path: Path) -> None:
    options = (
        "model.dtype=float32",
        "reward.verifier=dapo.rewards.examples:has_digit",
        "train.threads=1",
    )
    found = []
    for engines in (0, 2):
        output = tmp_path / f"{engines}.json"
        overrides = (*options, "eval.max_response_tokens=8", f"rollout.engines={engines}")
        asked = EvalRequest(
            "{builtin: sums, size: 12}", samples_per_problem=3, output=output, overrides=overrides
        )
        evaluate_model("tiny-random", asked)
        found.append(json.loads(output.read_text()))
    assert found[0] == found[1]
    assert found[0]["problems"] == 12


# --- blueprints and words


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        (["rollout.engines=1"], 8),
        (["rollout.engines=3"], 2),
        (["rollout.engines=16"], 1),
        (["rollout.engines=3", "schedule=one_step_off"], 2),
        (["rollout.engines=1", "schedule=one_step_off"], 4),
        (["rollout.engines=3", "train.threads=5"], 5),
        (["rollout.engine=vllm"], 8),
    ],
)
def test_threads_are_shared_equally_unless_they_are_given(options: list[str], threads: int) -> None:
    assert engine_threads(tiny("train.threads=null", *options), 8) == threads


def test_a_worker_spec_sets_the_threads_before_the_interpreter_starts() -> None:
    made = engine_specs(tiny("rollout.engines=2", "train.threads=3"))
    assert [
        (one.cpus, one.environment["OMP_NUM_THREADS"], one.options["threads"]) for one in made
    ] == [(3, "3", 3)] * 2


def test_a_clusters_gpus_are_asked_for_where_it_has_any() -> None:
    def gpus(*options: str, of: float) -> list[float]:
        config = tiny("launcher=ray", "rollout.engines=2", *options)
        return [spec.gpus for spec in engine_specs(config, [Node(cpus=8, gpus=of)])]

    assert gpus(of=0) == [0, 0]
    assert gpus(of=8) == [1, 1]
    assert gpus("distributed.gpus_per_process=0.25", of=8) == [0.25, 0.25]


def test_engines_take_the_gpus_that_trainers_leave_or_share_all_of_them() -> None:
    eight = list("01234567")
    assert gpu_assignments(["0"], trainers=1, engines=2, gpus_per_engine=1) == [None, None]
    assert gpu_assignments(eight, trainers=4, engines=4, gpus_per_engine=1) == ["4", "5", "6", "7"]
    assert gpu_assignments(eight, trainers=2, engines=3, gpus_per_engine=2) == ["2,3", "4,5", "6,7"]
    assert gpu_assignments(eight, trainers=8, engines=8, gpus_per_engine=1) == eight
    assert gpu_assignments(["3", "5"], trainers=1, engines=1, gpus_per_engine=1) == ["5"]
    assert gpu_assignments(["3", "5"], trainers=1, engines=3, gpus_per_engine=1) == ["3", "5", "3"]


def test_check_says_which_options_have_no_effect() -> None:
    unused = ["rollout.vllm.cache_gib=1", "distributed.gpus_per_process=1"]
    names = [line.partition(":")[0] for line in ignored_options(tiny(*unused))]
    for name in ("rollout.vllm.*", "distributed.gpus_per_process"):
        assert name in names
    used = [
        "rollout.engines=1",
        "rollout.clock=load",
        "distributed.gpus_per_process=1",
        "launcher=ray",
    ]
    assert not [
        line
        for line in ignored_options(tiny(*used))
        if line.startswith(("rollout", "distributed", "launcher"))
    ]
