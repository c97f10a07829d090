"""Laws of workers on Ray, on a real cluster of several nodes on this machine: places, weights,
losses, newcomers.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.launcher_contract import (
    COUNTING_WORKER,
    PROGRAM_ENVIRONMENT,
    SECRETS,
    WORKER_ENVIRONMENT,
    LauncherContract,
    Weights,
    read_weights,
    start,
)
from dapo.cli.train import resume_run, start_run
from dapo.core.errors import LaunchError, WorkerDied
from dapo.distributed.engine_pool import EnginePool
from dapo.distributed.engine_specs import engine_specs
from dapo.distributed.protocol import WorkerSpec
from dapo.distributed.ray.cluster import PRESTART, describe_exposure
from dapo.distributed.ray.launcher import RayLauncher, RayWorker
from dapo.distributed.trainer_group import trainer_specs
from dapo.distributed.weight_files import PREFIX
from dapo.engines.checked import CheckedEngine
from dapo.engines.engine import RolloutEngine
from dapo.policy.builtin_models import TINY_VOCABULARY
from dapo.start import resolve
from dapo.start.resolve import ComputeDevice, resolve_auto
from dapo.training.train import train
from dapo.types import Generation
from helpers.launchers import LightLauncher, engine_spec
from helpers.processes import is_alive, wait_until, wait_until_ended
from helpers.sockets import descendants, is_private, listeners
from helpers.tiny_runs import CONFIGS, EVENTFUL, contents, differences, new_run, tiny

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

HEAD_CPUS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with four CPUs; tests add nodes and take them away again."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**dict.fromkeys(PRESTART, "0"), **SECRETS}.items():
            environment.setenv(name, value)
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": HEAD_CPUS, "include_dashboard": False}
        )
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def start_in(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., RayLauncher]]:
    made: list[RayLauncher] = []

    def make(timeout_s: float, **options: Any) -> RayLauncher:
        made.append(
            RayLauncher(tmp_path / "logs", timeout_s=timeout_s, address=cluster.address, **options)
        )
        return made[-1]

    yield make
    for launcher in made:
        launcher.close()
    wait_for_free_cpus(HEAD_CPUS)


@pytest.fixture
def launcher(start_in: Callable[..., RayLauncher]) -> RayLauncher:
    return start_in(60)


def wait_for_free_cpus(cpus: float) -> None:
    """Wait until the cluster has so many CPUs free."""
    wait_until(
        lambda: round(ray.available_resources().get("CPU", 0), 2) == cpus,
        timeout_s=15,
        what=f"{cpus} free CPUs",
    )


def needing(cpus: float, gpus: float = 0) -> WorkerSpec:
    return WorkerSpec(COUNTING_WORKER.factory, {}, WORKER_ENVIRONMENT, cpus=cpus, gpus=gpus)


class TestRayLauncherContract(LauncherContract):
    """All of them."""


# --- devices


def test_auto_is_resolved_by_a_machine_of_the_cluster_not_by_the_head(
    cluster: Any, start_in: Callable[..., RayLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ComputeDevice.of_this_process("auto")
    # this process, the head, gets another processor than the workers
    monkeypatch.setattr(
        resolve,
        "vector_extensions",
        lambda: ["avx2"] if here.multiplies_bfloat16 else ["avx512_bf16"],
    )
    assert ComputeDevice.of_this_process("auto").multiplies_bfloat16 is not here.multiplies_bfloat16
    dtype = {True: "bfloat16", False: "float32"}[here.multiplies_bfloat16]
    assert (
        resolve_auto(tiny("model.dtype=auto", f"launcher=ray:{cluster.address}")).model.dtype
        == dtype
    )
    # without a cluster this machine decides
    assert resolve_auto(tiny("model.dtype=auto")).model.dtype != dtype


# --- places


def test_what_cannot_be_placed_is_named_with_what_there_is(
    start_in: Callable[..., RayLauncher],
) -> None:
    launcher = start_in(1)
    with pytest.raises(LaunchError) as error:
        launcher.start(["a", "b", "c"], [needing(3), needing(3), needing(1, gpus=2)])
    assert (
        str(error.value)
        == "not enough resources within 1 s for b (3 CPUs) and c (1 CPU, 2 GPUs), 4 CPUs, 2 GPUs in"
        " all; the cluster has 1 node with 4 CPUs (1 free; 4 on the largest node) and 0 GPUs (0"
        " free; 0 on the largest node)"
    )


def test_a_worker_group_gets_all_of_its_bundles_or_none(
    start_in: Callable[..., RayLauncher],
) -> None:
    launcher = start_in(1)
    with pytest.raises(
        LaunchError, match=r"r0, r1, r2 \(2 CPUs each\), 6 CPUs in all; .*4 CPUs \(4 free"
    ):
        launcher.start(["r0", "r1", "r2"], [needing(2)] * 3, together=True)
    wait_for_free_cpus(HEAD_CPUS)
    trainer_group = start_in(60).start(["r0", "r1"], [needing(2)] * 2, together=True)
    assert [worker.call("add", 1).result(120) for worker in trainer_group] == [1, 1]
    wait_for_free_cpus(0)


def test_each_rank_computes_on_the_gpu_of_its_engine_also_after_the_engine_is_replaced(
    cluster: Any, start_in: Callable[..., RayLauncher]
) -> None:
    nodes = [cluster.add_node(num_cpus=8, num_gpus=gpus) for gpus in (4, 2)]
    try:
        launcher = start_in(120)
        config = tiny(
            *(
                "launcher=ray:auto",
                "train.device=cuda",
                "rollout.engine=vllm",
                "rollout.vllm.tensor_parallel=2",
            ),
            *(
                "distributed.gpus_per_process=0.5",
                "distributed.trainer_ranks=6",
                "rollout.engines=3",
            ),
            "train.threads=1",
        )
        made = {
            "factory": COUNTING_WORKER.factory,
            "options": {},
            "environment": COUNTING_WORKER.environment,
        }
        specs = [replace(spec, **made) for spec in engine_specs(config, launcher.nodes)]
        engines = launcher.start([f"engine-{i}" for i in range(3)], specs)
        ranks = [replace(spec, **made) for spec in trainer_specs(config, launcher.nodes)]
        trainers = launcher.start([f"trainer-{i}" for i in range(6)], ranks, together=True)

        found = [engine.call("gpus").result(120) for engine in engines]
        assert len({gpu for gpus in found for gpu in gpus}) == 6
        assert [len({gpu.split("/")[0] for gpu in gpus}) for gpus in found] == [1, 1, 1]
        assert [trainer.call("gpus").result(120) for trainer in trainers] == [
            [gpu] for gpus in found for gpu in gpus
        ]
        engines[1].kill()
        (again,) = launcher.start(["engine-1"], specs[:1])
        assert again.call("gpus").result(120) == found[1]
        launcher.close()
    finally:
        for node in nodes:
            cluster.remove_node(node)


def test_a_worker_groups_placement_group_is_removed_with_its_last_worker(
    launcher: RayLauncher,
) -> None:
    trainer_group = launcher.start(["r0", "r1"], [needing(2)] * 2, together=True)
    os.kill(trainer_group[0].pid, signal.SIGKILL)
    with pytest.raises(
        WorkerDied,
        match=rf"r0 \(process {trainer_group[0].pid} on node [\d.]+\) is gone: its worker process",
    ):
        trainer_group[0].call("add", 1).result(120)
    trainer_group[1].kill()
    again = launcher.start(["r0", "r1"], [needing(2)] * 2, together=True)
    assert [worker.call("add", 2).result(120) for worker in again] == [2, 2]


def test_a_worker_without_gpus_sees_none(launcher: RayLauncher) -> None:
    assert start(launcher).call("variable", "CUDA_VISIBLE_DEVICES").result(120) == ""


def test_another_interpreter_is_used(launcher: RayLauncher, tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nOTHER=yes exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    spec = WorkerSpec(COUNTING_WORKER.factory, {}, WORKER_ENVIRONMENT, python=str(other))
    assert launcher.start(["one"], [spec])[0].call("variable", "OTHER").result(120) == "yes"


# --- weights


def test_weights_reach_a_worker_that_reads_no_files_of_this_machine(
    start_in: Callable[..., RayLauncher],
) -> None:
    launcher = start_in(60, use_shared_memory=False)
    worker = start(launcher)
    read_weights(launcher, worker)
    path = worker.call("source", launcher.publish_weights(Weights({"a": torch.ones(2)}), 4)).result(
        120
    )
    assert Path(path).parent.name.startswith(PREFIX)
    assert not Path(path).parent.exists()  # nobody reads it any more


# --- losses and newcomers


def test_a_lost_node_takes_its_workers_and_a_new_node_starts_a_waiting_worker(
    cluster: Any, launcher: RayLauncher
) -> None:
    leaving = cluster.add_node(num_cpus=8)
    worker = launcher.start(["big"], [needing(8)])[0]
    future = worker.call("sleep", 60)
    cluster.remove_node(leaving, allow_graceful=False)
    with pytest.raises(
        WorkerDied,
        match=r"big \(process \d+ on node [\d.]+\) is (gone: its (node|worker)|out of reach)",
    ):
        future.result(60)
    replacement: Future[Any] = Future()
    threading.Thread(
        target=lambda: replacement.set_result(launcher.start(["big"], [needing(8)])[0])
    ).start()
    time.sleep(0.5)
    assert not replacement.done()
    joining = cluster.add_node(num_cpus=8)
    assert replacement.result(60).call("add", 1).result(120) == 1
    launcher.close()
    cluster.remove_node(joining)


PROGRAM = """
import json, os, signal, sys, pathlib, time
from dapo.distributed.ray.launcher import RayLauncher
from contracts.launcher_contract import start
answer = signal.signal(signal.SIGTERM, lambda *_: None)
mine = signal.getsignal(signal.SIGTERM)
launcher = RayLauncher(pathlib.Path(sys.argv[1]), timeout_s=60, address=sys.argv[2] or None)
worker = start(launcher)
assert worker.call("add", 1).result(120) == 1
assert signal.getsignal(signal.SIGTERM) is mine, "SIGTERM was taken"
busy = worker.call("sleep", 60)
print(json.dumps({"worker": worker.pid, "session": ray_session(), "address": ray_address()}), flush=True)
sys.stdin.readline()
launcher.close()
print(repr(busy.exception(5)), flush=True)
sys.stdin.readline()
"""
SESSION = """
def ray_session():
    import ray
    return ray._private.worker._global_node.get_session_dir_path()

def ray_address():
    import ray
    return ray.get_runtime_context().gcs_address
"""


def run_program(tmp_path: Path, address: str) -> "subprocess.Popen[str]":
    """A driver of its own, with warnings as errors."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SESSION + PROGRAM, str(tmp_path / "logs"), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=PROGRAM_ENVIRONMENT | {"HOME": str(tmp_path)},
    )


def stranger(address: str) -> "subprocess.CompletedProcess[str]":
    """Someone who reaches the cluster's port and has another secret."""
    program = (
        "import sys, ray; from ray._raylet import GcsClient;"
        " print(GcsClient(sys.argv[1]).get_all_node_info())"
    )
    environment = PROGRAM_ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    command = [sys.executable, "-c", program, address]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def session_processes(session: str) -> list[int]:
    """Processes of a Ray session: all have its folder in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and session in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_the_resources_of_a_killed_driver_are_released(cluster: Any, tmp_path: Path) -> None:
    with run_program(tmp_path, cluster.address) as driver:
        assert driver.stdout is not None
        info = json.loads(driver.stdout.readline())
        wait_for_free_cpus(HEAD_CPUS - 1)
        driver.kill()
    wait_until_ended(info["worker"])
    wait_for_free_cpus(HEAD_CPUS)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_cluster_of_the_runs_own_ends_with_it(tmp_path: Path, is_killed: bool) -> None:
    with run_program(tmp_path, "") as driver:
        assert driver.stdout is not None
        assert driver.stdin is not None
        info = json.loads(driver.stdout.readline())
        processes = session_processes(info["session"])
        assert len(processes) > 2
        if not is_killed:
            found = listeners(descendants(driver.pid))
            assert len({listener.pid for listener in found}) > 3
            assert [listener for listener in found if not is_private(listener)] == []
            assert stat.S_IMODE(Path(info["session"]).parents[1].stat().st_mode) == 0o700
            assert "Authentication" in stranger(info["address"]).stderr
        if is_killed:
            driver.kill()
        else:
            print(file=driver.stdin, flush=True)
            assert "WorkerDied('one was ended by this run')" in driver.stdout.readline()
        wait_until_ended(info["worker"], *processes)
        if not is_killed:
            print(file=driver.stdin, flush=True)
            assert driver.wait(60) == 0


def test_a_cluster_that_cannot_be_joined_is_an_error_that_names_the_address() -> None:
    program = (
        "import sys, pathlib; from dapo.distributed.ray.launcher import RayLauncher; from"
        " dapo.core.errors import *\nfor address in sys.argv[1:]:\n    try:"
        " RayLauncher(pathlib.Path('.'), timeout_s=1, address=address).nodes\n    except"
        " LaunchError as error: print(error)"
    )
    addresses = ["127.0.0.1:1", "ray://127.0.0.1:1"]
    result = subprocess.run(
        [sys.executable, "-c", program, *addresses],
        capture_output=True,
        text=True,
        env=PROGRAM_ENVIRONMENT,
        check=True,
    )
    unused, client = result.stdout.splitlines()
    assert "launcher=ray:127.0.0.1:1 could not be joined" in unused
    assert "refused" in unused
    assert "HOST:PORT" in client


@pytest.mark.parametrize(
    ("machines", "has_token", "options", "named"),
    [
        (1, False, ["distributed.trainer_ranks=2"], None),
        (2, True, ["rollout.engines=2"], None),
        (2, False, ["rollout.engines=2"], ["Ray"]),
        (3, True, ["distributed.trainer_ranks=2", "train.device=cpu"], ["gloo"]),
        (3, False, ["distributed.trainer_ranks=2"], ["Ray", "gloo", "NCCL"]),
    ],
)
def test_connections_without_a_secret_are_named_where_there_are_several_machines(
    machines: int, has_token: bool, options: list[str], named: list[str] | None
) -> None:
    note = describe_exposure(tiny(*options, "launcher=ray"), machines=machines, has_token=has_token)
    found = None if note is None else [name for name in ("Ray", "gloo", "NCCL") if name in note]
    assert found == named
    assert note is None or (f"{machines} machines" in note and "firewall" in note)


# --- whole runs

OPTIONS = ("train.num_steps=3", "train.save_every=1", "train.eval_every=2", "train.threads=1")


class TrackingRayLauncher(RayLauncher):
    """Knows its workers by name."""

    def start(self, names: Sequence[str], *arguments: Any, **options: Any) -> list[RayWorker]:
        workers = super().start(names, *arguments, **options)
        self.__dict__.setdefault("running", {}).update(zip(names, workers, strict=True))
        return workers


class HookedEngine:
    """An engine with something that happens before some of its polls."""

    def __init__(self, engine: EnginePool, faults: dict[int, Callable[[], None]]) -> None:
        self._engine = engine
        self._faults = faults
        self._polls = 0
        self.drop_weights = engine.drop_weights
        self.load_weights = engine.load_weights
        self.submit = engine.submit
        self.abort = engine.abort
        self.close = engine.close

    def poll(self) -> list[Generation]:
        self._faults.pop(self._polls, lambda: None)()
        self._polls += 1
        return self._engine.poll()


def trained(path: Path, engine: RolloutEngine) -> dict[str, Any]:
    """What a run holds that this engine has sampled for."""
    with new_run(tiny(*OPTIONS), path) as run:
        run.sampling.engine = CheckedEngine(engine, vocabulary=len(TINY_VOCABULARY))
        train(run)
        engine.close()
    return contents(path)


def test_a_killed_engine_and_a_node_lost_in_mid_step_change_nothing_of_a_run(
    cluster: Any, tmp_path: Path
) -> None:
    specs = [engine_spec("HistoryDependentEngine", slots=4, vocabulary=len(TINY_VOCABULARY))] * 2
    local = LightLauncher(tmp_path / "local-logs")
    expected = trained(tmp_path / "local", EnginePool(local, specs, log=print))
    local.close()

    second = cluster.add_node(num_cpus=1)
    launcher = TrackingRayLauncher(tmp_path / "logs", timeout_s=60, address=cluster.address)
    # so that each engine is on another node
    holder = launcher.start(["holder"], [needing(HEAD_CPUS - 1)])[0]
    messages: list[str] = []
    engine = EnginePool(launcher, specs, log=messages.append)

    def leave() -> None:
        holder.kill()
        engines = [launcher.running[name].pid for name in ("engine-0", "engine-1")]
        cluster.remove_node(second, allow_graceful=False)
        # a worker outlives its node for a moment, in which a fast run may end
        wait_until(
            lambda: not all(map(is_alive, engines)), what="the end of the engine of the lost node"
        )

    faults = {12: lambda: os.kill(launcher.running["engine-0"].pid, signal.SIGKILL), 30: leave}
    found = trained(tmp_path / "ray", HookedEngine(engine, faults))
    launcher.close()
    assert faults == {}
    assert len(messages) == 2
    assert differences(found, expected) == []


def process_of(log: Path) -> int:
    """The process that prints into a log."""
    for fd_path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if fd_path.readlink() == log:
                return int(fd_path.parts[2])
        except OSError:
            continue
    raise LookupError(f"nobody prints into {log}")


TWO_RANKS = (*OPTIONS, "distributed.trainer_ranks=2", "train.passes_per_step=2")


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks, with two passes over each batch, without Ray."""
    run = tmp_path_factory.mktemp("local") / "run"
    start_run(tiny(*TWO_RANKS), run_dir=run, config_name="tiny")
    return run


def wait_for_first_checkpoint(run: Path, is_running: Callable[[], bool]) -> None:
    while is_running() and not (run / "checkpoints" / "step_000001").exists():
        time.sleep(0.01)


def test_a_ray_run_with_a_killed_trainer_rank_ends_like_a_local_one(
    cluster: Any, local_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "ray"
    is_done = threading.Event()

    def kill_a_rank() -> None:
        wait_for_first_checkpoint(run, lambda: not is_done.is_set())
        os.kill(process_of(run / "logs" / "trainer-1.log"), signal.SIGKILL)

    killer = threading.Thread(target=kill_a_rank)
    killer.start()
    try:
        start_run(
            tiny(*TWO_RANKS, f"launcher=ray:{cluster.address}"), run_dir=run, config_name="tiny"
        )
    finally:
        is_done.set()
        killer.join()
    assert "goes back to its last checkpoint by itself, time 1 of" in capsys.readouterr().err
    assert differences(contents(run), contents(local_run)) == []
    wait_for_free_cpus(HEAD_CPUS)


def test_a_ray_run_whose_driver_is_killed_is_resumed_and_ends_like_a_local_one(
    cluster: Any, local_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "ray"
    errors = tmp_path / "errors"
    overrides = [*TWO_RANKS, f"launcher=ray:{cluster.address}"]
    command = ["train", str(CONFIGS / "tiny.yaml"), *overrides, "--run-dir", str(run)]
    with (
        open(errors, "w") as file,
        subprocess.Popen(
            [sys.executable, "-m", "dapo", *command], env=PROGRAM_ENVIRONMENT, stderr=file
        ) as driver,
    ):
        wait_for_first_checkpoint(run, lambda: driver.poll() is None)
        assert driver.poll() is None, errors.read_text()
        driver.kill()
    wait_for_free_cpus(HEAD_CPUS)
    resume_run(run, ["rollout.engines=1"])  # the ranks' weights reach an engine in another process
    assert differences(contents(run), contents(local_run)) == []
    assert {path.name for path in (run / "logs").iterdir()} == {
        "console.log",
        "engine-0.log",
        "trainer-0.log",
        "trainer-1.log",
    }


@pytest.mark.timeout(600)  # 25 s alone, two runs
def test_a_ray_run_that_predicts_signals_decides_and_trains_as_a_local_one(
    cluster: Any, tmp_path: Path
) -> None:
    options = (*EVENTFUL, "dynamic_sampling.predict=true")
    options = (*options, "rollout.engines=2", "distributed.trainer_ranks=2", "train.num_steps=4")
    runs = {
        launcher: tmp_path / launcher.partition(":")[0]
        for launcher in ("local", f"ray:{cluster.address}")
    }
    for launcher, run in runs.items():
        start_run(tiny(*options, f"launcher={launcher}"), run_dir=run, config_name="tiny")
    expected, found = map(contents, runs.values())
    assert sum(row.get("rollout/problems_skipped", 0) for row in expected["metrics"]) > 0
    assert differences(found, expected) == []
    wait_for_free_cpus(HEAD_CPUS)


def test_a_run_on_two_addresses_names_what_carries_no_secret_before_its_first_step(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
    options = ("rollout.engines=1", "train.num_steps=1", f"launcher=ray:{cluster.address}")
    start_run(tiny(*options), run_dir=tmp_path / "run", config_name="tiny")
    cluster.remove_node(node)
    note = "this run uses 2 machines, and connections between them carry no secret: Ray, which runs"
    step = "step 1/1"
    assert next(
        line for line in capsys.readouterr().out.splitlines() if note in line or step in line
    ).startswith(note)
