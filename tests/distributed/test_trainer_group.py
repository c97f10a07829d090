"""Laws of a group of trainer ranks: a run on two is the run on one, and a lost rank costs nothing
but time.
"""

import gc
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dapo.cli.train import export_run, resume_run, start_run
from dapo.config import Config
from dapo.core.errors import NumericsError, OutOfMemory, TrainerLost, WorkerDied, WorkerFault
from dapo.distributed.trainer_group import TrainerGroup
from dapo.distributed.weight_files import WeightsFolder
from dapo.policy.checkpoint import SavedWeights
from dapo.policy.model import load_model
from dapo.start.resolve import device_for_inputs
from dapo.training.train import train
from helpers.forked_workers import STARTED
from helpers.processes import is_alive
from helpers.tiny_policies import groups_of
from helpers.tiny_runs import metrics, new_run, saved_steps, tiny

pytestmark = pytest.mark.usefixtures("forked_workers")

STEPS = 5


def config_of(model: Path, *overrides: str) -> Config:
    """Two passes of two updates a step, gradients clipped, checkpoints on the way; the divergence
    to a reference that moves is in the reward, and the weight of the entropy follows it.
    """
    return tiny(
        f"model.name={model}",
        "model.dtype=float64",
        "optim.lr=0.001",
        "optim.max_grad_norm=0.5",
        "rollout.temperature=0.8",
        "dynamic_sampling.max_groups_per_step=40",
        "loss.kl_coef=0.1",
        "loss.kl_in=reward",
        "loss.kl_estimator=k1",
        "loss.reference.every=2",
        "loss.entropy_target=99",
        f"train.num_steps={STEPS}",
        "train.passes_per_step=2",
        "train.keep_checkpoints=9",
        "train.threads=1",
        *overrides,
    )


TWO = "distributed.trainer_ranks=2"


@pytest.fixture(scope="module")
def runs(float64_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same run in this process, and on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    start_run(config_of(float64_model), run_dir=folder / "1", config_name="t")
    start_run(config_of(float64_model, TWO), run_dir=folder / "2", config_name="t")
    return {1: folder / "1", 2: folder / "2"}


def final_weights(run: Path) -> dict[str, Tensor]:
    return dict(SavedWeights(run / "checkpoints" / f"step_{STEPS:06d}").named_tensors())


def checkpoint_files(run: Path) -> dict[str, bytes]:
    """The files of the last checkpoint; without those that hold the wall time, or its checksum."""
    folder = run / "checkpoints" / f"step_{STEPS:06d}"
    paths = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("state.json", "manifest.json")
    ]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def assert_same_run(found: Path, expected: Path) -> None:
    """Metrics and weights to 1e-8; what ranks compute twice depends on how a group is cut for
    them.
    """
    for row, other in zip(metrics(found), metrics(expected), strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            if name == "optim/shared_token_fraction":
                continue
            assert row[name] == pytest.approx(value, rel=1e-8, abs=1e-8), name
    weights = final_weights(found)
    for name, tensor in final_weights(expected).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-8)


def test_five_steps_on_two_ranks_are_those_of_one_process(runs: dict[int, Path]) -> None:
    rows = metrics(runs[1])[1:]
    assert max(row["optim/grad_norm"] for row in rows) > 0.5
    assert [abs(row["reward/kl_mean"]) < 1e-12 for row in rows] == [True, False, True, False, True]
    assert_same_run(runs[2], runs[1])
    assert (runs[2] / "checkpoints" / "step_000005" / "exp_avg").is_dir()
    assert (runs[2] / "logs" / "trainer-1.log").exists()


def test_a_controller_without_policy_or_engine_holds_no_weights_and_the_run_is_the_same(
    runs: dict[int, Path], float64_model: Path, tmp_path: Path
) -> None:
    def parameters() -> set[int]:
        return {
            id(found)
            for found in gc.get_objects()
            if type(found) is torch.nn.Parameter and not found.is_meta
        }

    gc.collect()
    before = parameters()
    with new_run(config_of(float64_model, TWO, "rollout.engines=1"), tmp_path / "run") as run:
        train(run)
        gc.collect()
        assert parameters() <= before
    assert metrics(tmp_path / "run") == metrics(runs[2])
    files, expected = (checkpoint_files(path) for path in (tmp_path / "run", runs[2]))
    differing = [name for name in expected if files.get(name) != expected[name]]
    assert len(expected) > 6
    assert set(differing) <= {"provenance.json"}  # the number of engines


@pytest.mark.parametrize(
    ("options", "training", "device"),
    [
        ((), True, "cpu"),
        ((TWO,), True, "cpu"),  # the controller samples
        (("rollout.engines=1",), True, "cpu"),  # and trains
        ((TWO, "rollout.engines=1"), True, "meta"),
        ((TWO, "rollout.engine=vllm"), True, "meta"),
        (("launcher=ray", "rollout.engines=1"), True, "meta"),
        ((TWO, "rollout.engines=1"), False, "cpu"),  # an evaluation hands the weights on
    ],
)
def test_the_controller_has_the_weights_where_it_needs_them(
    options: tuple[str, ...], training: bool, device: str
) -> None:
    assert device_for_inputs(tiny("train.device=cpu", *options), training=training) == device


def test_the_export_of_a_run_on_two_ranks_is_that_of_one(
    runs: dict[int, Path], tmp_path: Path
) -> None:
    for size, run in runs.items():
        export_run(run, tmp_path / str(size), step=None)
    one, two = (load_file(tmp_path / str(size) / "model.safetensors") for size in (1, 2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-8)
    load_model(str(tmp_path / "2"), dtype=torch.float64)


def test_a_killed_rank_sends_the_run_back_to_its_checkpoint_with_the_same_end(
    runs: dict[int, Path], float64_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with after_step(3, run, lambda: os.kill(trainers()[1], signal.SIGKILL)):
        start_run(config_of(float64_model, TWO), run_dir=run, config_name="t")
    stderr = capsys.readouterr().err
    assert "trainer-1 was ended by SIGKILL" in stderr
    assert "the run goes back to its last checkpoint by itself, time 1 of 3" in stderr
    assert metrics(run) == metrics(runs[2])
    files, expected = (checkpoint_files(path) for path in (run, runs[2]))
    assert len(expected) > 6
    assert [name for name in expected if files.get(name) != expected[name]] == []
    assert trainers() == []


def test_beyond_max_restarts_the_run_fails_and_another_number_of_ranks_can_resume_it(
    runs: dict[int, Path], float64_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = config_of(float64_model, TWO)
    with (
        after_step(3, run, lambda: os.kill(trainers()[0], signal.SIGKILL)),
        pytest.raises(TrainerLost, match=r"SIGKILL.*0 times \(at most 0\).*dapo resume") as caught,
    ):
        start_run(config, run_dir=run, config_name="t", max_restarts=0)
    assert caught.value.exit_code == 1
    assert f"step_{STEPS:06d}" not in saved_steps(run)
    assert trainers() == []
    resume_run(run, ["distributed.trainer_ranks=1"])
    assert_same_run(run, runs[1])


class after_step:
    """While the body runs: do something once a step's line is in the metrics."""

    def __init__(self, step: int, run: Path, action: Callable[[], None]) -> None:
        self._step = step
        self._run = run
        self._action = action
        self._thread = threading.Thread(target=self._watch)
        self._stop = threading.Event()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        path = self._run / "metrics.jsonl"
        while not self._stop.wait(0.005):
            if path.exists() and f'"step": {self._step}' in path.read_text():
                self._action()
                return


def trainers() -> list[int]:
    """Process ids of the living trainer ranks that this process has had forked, in their order;
    other tests keep engines of their own.
    """
    found = {}
    for pid in filter(is_alive, STARTED):
        try:
            log = Path(os.readlink(f"/proc/{pid}/fd/1")).name
        except OSError:
            continue
        if log.startswith("trainer-"):
            found[log] = pid
    return [pid for _, pid in sorted(found.items())]


class FakeWorker:
    """A worker whose answers are given beforehand, by method; None for one that never answers."""

    def __init__(self, name: str, answers: dict[str, Any]) -> None:
        self.name = name
        always = {"open_gate": ..., "init_process_group": ..., "can_access": True, "store": ...}
        self.answers = always | answers
        self.calls: dict[str, Any] = {}
        """The first argument of the last call of each method."""
        self.is_killed = False

    def call(self, method: str, /, *arguments: Any, **options: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        given = self.answers[method]
        self.calls[method] = arguments[0] if arguments else None
        if callable(given):
            given = given(*arguments)
        if isinstance(given, Exception):
            future.set_exception(given)
        elif given is not None:
            future.set_result(given)
        return future

    def kill(self) -> None:
        self.is_killed = True

    def close(self) -> None: ...


class FakeLauncher:
    """Starts what it was given."""

    nodes = ()

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.workers = [FakeWorker(f"trainer-{i}", given) for i, given in enumerate(answers)]

    def start(
        self, names: Sequence[str], specs: Sequence[object], *, together: bool = False
    ) -> list[FakeWorker]:
        assert together
        assert list(names) == [worker.name for worker in self.workers]
        return self.workers


@pytest.fixture
def trainer_group_of() -> Iterator[Callable[..., tuple[TrainerGroup, FakeLauncher]]]:
    trainer_groups = []

    def make(*answers: dict[str, Any]) -> tuple[TrainerGroup, FakeLauncher]:
        launcher: Any = FakeLauncher(*answers)
        config = tiny(f"distributed.trainer_ranks={len(answers)}")
        trainer_groups.append(TrainerGroup(config, launcher, call_timeout_s=0.2))
        return trainer_groups[-1], launcher

    yield make
    for trainer_group in trainer_groups:
        trainer_group.close()


ANSWER = ({"loss/policy": 1.0}, 0)


def test_a_rank_that_hangs_ends_the_trainer_group_within_the_timeout_and_is_named(
    trainer_group_of: Any,
) -> None:
    trainer_group, launcher = trainer_group_of({"update": ANSWER}, {"update": None})
    with pytest.raises(TrainerLost, match=r"^trainer-1 gave no answer within 0\.2 s"):
        trainer_group.update(groups_of([(3, (4, 4))]), step=1)
    assert all(worker.is_killed for worker in launcher.workers)
    with pytest.raises(TrainerLost, match="trainer-1 gave no answer"):
        trainer_group.weights(version=1)


def test_a_dead_rank_is_reported_even_where_another_fails_first_because_of_it(
    trainer_group_of: Any,
) -> None:
    trainer_group, launcher = trainer_group_of(
        {"update": WorkerFault("connection reset")}, {"update": WorkerDied("trainer-1 is gone")}
    )
    with pytest.raises(TrainerLost, match="trainer-1 is gone"):
        trainer_group.update(groups_of([(3, (4, 4))]), step=1)
    assert all(worker.is_killed for worker in launcher.workers)


def test_an_error_that_all_ranks_share_is_raised_and_the_trainer_group_goes_on(
    trainer_group_of: Any,
) -> None:
    error = NumericsError("not finite")
    trainer_group, launcher = trainer_group_of(
        {"update": error, "load": 3}, {"update": error, "load": 3}
    )
    with pytest.raises(NumericsError, match="not finite"):
        trainer_group.update(groups_of([(3, (4, 4))]), step=1)
    trainer_group.load(Path("somewhere"))
    assert trainer_group.skipped_in_a_row == 3
    assert not any(worker.is_killed for worker in launcher.workers)


def test_a_fault_in_the_ranks_is_raised_as_it_is_and_ends_the_trainer_group(
    trainer_group_of: Any,
) -> None:
    fault = WorkerFault("ZeroDivisionError: by zero")
    trainer_group, launcher = trainer_group_of({"update": fault}, {"update": fault})
    with pytest.raises(WorkerFault, match="by zero"):
        trainer_group.update(groups_of([(3, (4, 4))]), step=1)
    assert all(worker.is_killed for worker in launcher.workers)


def test_a_rank_without_memory_is_the_error_where_others_fail_because_of_it(
    trainer_group_of: Any,
) -> None:
    trainer_group, _ = trainer_group_of(
        {"update": WorkerFault("connection reset")},
        {"update": OutOfMemory("lower train.microbatch_tokens")},
    )
    with pytest.raises(OutOfMemory, match=r"train\.microbatch_tokens"):
        trainer_group.update(groups_of([(3, (4, 4))]), step=1)


def test_a_disk_that_refuses_a_checkpoint_is_an_os_error_like_in_one_process(
    trainer_group_of: Any, tmp_path: Path
) -> None:
    done = (True, None)
    refused = (True, "No space left on device")
    answers = {"snapshot": ..., "start_writing": ...}
    trainer_group, launcher = trainer_group_of(
        {**answers, "has_written": done}, {**answers, "has_written": refused}
    )
    with pytest.raises(OSError, match="No space left"):
        trainer_group.save(tmp_path)
    assert not any(worker.is_killed for worker in launcher.workers)


def test_a_checkpoint_that_is_never_written_ends_the_trainer_group(
    trainer_group_of: Any, tmp_path: Path
) -> None:
    answers = {"snapshot": ..., "start_writing": ..., "has_written": (False, None)}
    trainer_group, launcher = trainer_group_of(answers, answers)
    with pytest.raises(TrainerLost, match=r"not written a checkpoint within 0\.2 s"):
        trainer_group.save(tmp_path)
    assert all(worker.is_killed for worker in launcher.workers)


def test_weights_that_lie_in_shared_memory_are_handed_on_as_they_are(trainer_group_of: Any) -> None:
    trainer_group, _ = trainer_group_of({"export_weights": ...}, {"export_weights": ...})
    weights = trainer_group.weights(version=17)
    folder = WeightsFolder()
    assert weights.version == 17
    assert folder.write(weights, 17) == weights
    assert not list(folder.path.glob("*.safetensors"))
    folder.close()


def test_weights_come_in_a_message_where_rank_0_runs_on_another_machine(
    trainer_group_of: Any,
) -> None:
    from safetensors.torch import save

    content = save({"a": torch.ones(2)}, metadata={"version": "1", "tied": "b=a"})
    trainer_group, _ = trainer_group_of(
        {"can_access": False, "export_weights": len(content), "read_weights": content},
        {"export_weights": ...},
    )
    weights = trainer_group.weights(version=1)
    assert {name: tensor.tolist() for name, tensor in weights.named_tensors()} == {
        "a": [1, 1],
        "b": [1, 1],
    }


def test_a_piece_of_the_weights_is_read_while_the_one_before_it_is_written(
    trainer_group_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dapo.distributed.weight_files import write_chunks

    content = bytes(range(250))
    events: list[str] = []

    def read(start: int, size: int) -> bytes:
        events.append(f"read {start}")
        return content[start : start + size]

    def write(path: Path, chunks: Iterator[bytes], *, size: int) -> None:
        def noted() -> Iterator[bytes]:
            for chunk in chunks:
                events.append(f"write {chunk[0]}")
                yield chunk

        write_chunks(tmp_path / "weights", noted(), size=size)

    monkeypatch.setattr("dapo.distributed.trainer_group.PIECE_BYTES", 100)
    monkeypatch.setattr("dapo.distributed.trainer_group.write_chunks", write)
    monkeypatch.setattr(WeightsFolder, "keep", lambda folder, path, version: path)
    group, _ = trainer_group_of(
        {"can_access": False, "export_weights": len(content), "read_weights": read},
        {"export_weights": ...},
    )
    group.weights(version=1)
    assert (tmp_path / "weights").read_bytes() == content
    assert events == ["read 0", "read 100", "write 0", "read 200", "write 100", "write 200"]


def test_ranks_of_one_machine_meet_in_a_folder_of_their_user_alone(trainer_group_of: Any) -> None:
    group, launcher = trainer_group_of({}, {})
    assert all(
        worker.calls["init_process_group"].parent == group._folder.path
        for worker in launcher.workers
    )
    assert stat.S_IMODE(group._folder.path.stat().st_mode) == 0o700
