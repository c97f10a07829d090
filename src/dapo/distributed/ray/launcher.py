"""`launcher: ray`: workers are actors on a Ray cluster, one that is there or one of the run's own on this machine."""

import logging
import os
import queue
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dapo
from dapo.core.errors import EngineError, LaunchError, WorkerDied, WorkerFault
from dapo.distributed.environment import import_path, log_tail
from dapo.distributed.protocol import WorkerSpec
from dapo.distributed.ray.actor import ActorInfo, WorkerActor
from dapo.distributed.ray.placement import Reservation, reserve, total
from dapo.distributed.ray.weights import RayWeights
from dapo.distributed.weight_files import WeightsFolder
from dapo.engines.engine import WeightSource

CAUSE_CHARACTERS = 400
CONNECT_TIMEOUT_S = 10.0
PRESTART = ("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart")


class RayWorker:
    """An actor. It is never restarted in place: a successor is started by whoever needs one."""

    def __init__(
        self, name: str, actor: Any, reservation: Reservation, gpus: float, callbacks: "queue.SimpleQueue[Any]"
    ) -> None:
        self.name = name
        self.gpus = gpus
        self.actor_info: ActorInfo | None = None
        """Once it has a place."""
        self._actor = actor
        self._reservation = reservation
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._count = 0
        self._exit_message: str | None = None

    @property
    def pid(self) -> int:
        """Of its process, on its node."""
        return self._info.pid

    @property
    def node(self) -> str:
        """IP address."""
        return self._info.node

    @property
    def log(self) -> Path:
        """What it prints."""
        return self._info.log

    @property
    def is_dead(self) -> bool:
        """Ended, as far as is known here."""
        return self._exit_message is not None

    def call(self, method: str, /, *arguments: Any, **options: Any) -> "Future[Any]":
        """See Worker. Weights of this launcher may be among the arguments, not inside of them."""
        try:
            sent = [self._sendable(argument) for argument in arguments]
            kwargs = {name: self._sendable(value) for name, value in options.items()}
        except EngineError as error:  # weights that are gone
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        return self.send("call", method, sent, kwargs)

    def send(self, entry: str, /, *arguments: Any) -> "Future[Any]":
        """Have one of Host's own methods called."""
        future: Future[Any] = Future()
        with self._lock:
            if self._exit_message is not None:
                future.set_exception(WorkerDied(self._exit_message))
                return future
            reference = getattr(self._actor, entry).remote(*arguments)
            self._count += 1
            self._pending[self._count] = future
            complete = partial(self._complete, self._count, entry)
        # Ray's own thread must not wait: it hands the answer on
        reference.future().add_done_callback(lambda done: self._callbacks.put(partial(complete, done)))
        return future

    def kill(self) -> None:
        """See Worker."""
        self._mark_dead(f"{self.name} was ended by this run")

    def close(self) -> None:
        """See Worker."""
        self.kill()

    @property
    def _info(self) -> ActorInfo:
        assert self.actor_info is not None, f"{self.name} has not arrived"
        return self.actor_info

    def _sendable(self, value: Any) -> Any:
        return value.for_worker(reads_files=self._info.reads_files) if isinstance(value, RayWeights) else value

    def _complete(self, number: int, entry: str, done: "Future[Any]") -> None:
        """Turn what Ray says into an answer or an error."""
        from ray.exceptions import RayActorError, RayTaskError, RuntimeEnvSetupError

        error = done.exception()
        if isinstance(error, RuntimeEnvSetupError):
            self._mark_dead(f"the surroundings of {self.name} could not be set up: {error}", LaunchError)
        elif isinstance(error, RayActorError) and error.actor_init_failed:
            self._mark_dead(f"{self.name} could not be set up on its node: {error}", LaunchError)
        elif isinstance(error, RayTaskError):
            self._resolve(number, WorkerFault(f"{self.name}: the arguments or the answer cannot be sent: {error}"))
        elif error is not None:
            self._mark_dead(self._exit_reason(error))
        elif entry == "handshake":
            self._resolve(number, done.result())
        else:
            self._resolve(number, done.result()[1])

    def _resolve(self, number: int, value: Any) -> None:
        with self._lock:
            future = self._pending.pop(number, None)
        if future is None:
            return  # it has failed already, with the worker
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _mark_dead(self, cause: str, kind: type[Exception] = WorkerDied) -> None:
        """Make sure that it is gone, give its place back, fail what is pending."""
        import ray

        with self._lock:
            if self._exit_message is not None:
                return
            self._exit_message = cause
            pending, self._pending = list(self._pending.values()), {}
        try:
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)
                self._reservation.release()
        finally:
            for future in pending:
                future.set_exception(kind(cause))

    def _exit_reason(self, error: BaseException) -> str:
        """How it ended as Ray tells it, with the last it said."""
        from ray.exceptions import ActorUnavailableError

        where = f" (process {self.pid} on node {self.node})" if self.actor_info else ""
        text = str(error)
        if isinstance(error, ActorUnavailableError):
            how, cause = "is out of reach, perhaps with its node", text.partition("RpcError: ")[2]
        else:
            how, cause = "is gone", text.partition("because ")[2]
        message = f"{self.name}{where} {how}: {textwrap.shorten(cause or text, CAUSE_CHARACTERS, placeholder=' ...')}"
        if self.actor_info is None:
            return message
        return message + (log_tail(self.log) if self.log.exists() else f"; its log is {self.log} there")


class RayLauncher:
    """Starts actors; what they print goes to `logs/NAME.log` wherever their node can reach it.

    `address` of a cluster, or `auto`; none: Ray is started on this machine and stopped by `close`. There processes
    share the CPUs as they would without Ray, and only GPUs are counted; elsewhere both are. A cluster or a connection
    that was there before stays as it was.

    `use_shared_memory`: a worker that can read this machine's shared memory gets its weights through it; others, and
    without it all of them, through Ray's object store.
    """

    def __init__(
        self, logs: Path, *, timeout_s: float, address: str | None = None, use_shared_memory: bool = True
    ) -> None:
        self._logs = logs.resolve()
        self._timeout_s = timeout_s
        self._address = address
        self._use_shared_memory = use_shared_memory
        self._connection: _Connection | None = None
        self._workers: list[RayWorker] = []
        self._weights: WeightsFolder | None = None
        self._published: list[RayWeights] = []

    @property
    def gpus(self) -> float:
        """Of the whole cluster. Raises LaunchError if it cannot be reached."""
        self._connect()
        return total("GPU")

    def start(self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False) -> list[RayWorker]:
        """See Launcher."""
        connection = self._connect()
        deadline = time.monotonic() + self._timeout_s
        self._logs.mkdir(parents=True, exist_ok=True)
        self._workers = [worker for worker in self._workers if not worker.is_dead]
        reservations = reserve(
            names,
            specs,
            together=together,
            timeout_s=self._timeout_s,
            counts_cpus=not connection.owns_cluster,
            gpus_left=self._gpus_left() if connection.owns_cluster else None,
        )
        workers = [
            RayWorker(name, _actor(spec, reservation, index), reservation, spec.gpus, connection.callbacks)
            for name, spec, (reservation, index) in zip(names, specs, reservations, strict=True)
        ]
        self._workers += workers
        try:
            self._wait_until_ready(workers, specs, deadline)
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        return workers

    def publish_weights(self, weights: WeightSource, version: int) -> RayWeights:
        """See Launcher."""
        published = RayWeights(self._folder().write(weights, version), timeout_s=self._timeout_s)
        for old in self._published[:-1]:
            old.forget()
        self._published = [*self._published[-1:], published]
        return published

    def close(self) -> None:
        """See Launcher."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._published.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def _gpus_left(self) -> float:
        return total("GPU") - sum(worker.gpus for worker in self._workers)

    def _wait_until_ready(self, workers: Sequence[RayWorker], specs: Sequence[WorkerSpec], deadline: float) -> None:
        """Wait until all have arrived, then until all objects are made."""
        folder = self._folder().path if self._use_shared_memory else None
        handshakes = [worker.send("handshake", worker.name, self._logs, folder) for worker in workers]
        for worker, handshake in zip(workers, handshakes, strict=True):
            worker.actor_info = self._wait(
                handshake, deadline, f"{worker.name} has a place, but its process", "Ray's logs"
            )
        for worker in workers:
            if worker.actor_info is not None and worker.actor_info.version != dapo.__version__:
                raise LaunchError(
                    f"node {worker.node} has dapo {worker.actor_info.version}, this machine {dapo.__version__}; "
                    "install "
                    "the same version on all nodes"
                )
        made = [
            worker.send("make", spec.factory, dict(spec.options)) for worker, spec in zip(workers, specs, strict=True)
        ]
        for worker, future in zip(workers, made, strict=True):
            self._wait(future, deadline, worker.name, f"what it printed is in {worker.log} (node {worker.node})")

    def _wait(self, future: "Future[Any]", deadline: float, what: str, see: str) -> Any:
        try:
            return future.result(max(deadline - time.monotonic(), 0.0))
        except FutureTimeoutError as error:
            raise LaunchError(
                f"{what} was not ready within {self._timeout_s:g} s (distributed.start_timeout_s); {see}"
            ) from error

    def _folder(self) -> WeightsFolder:
        if self._weights is None:
            self._weights = WeightsFolder()
        return self._weights

    def _connect(self) -> "_Connection":
        if self._connection is None:
            self._connection = _Connection(self._address)
        return self._connection


class _Connection:
    """To a cluster, with the thread that takes what comes from it."""

    def __init__(self, address: str | None) -> None:
        ray = _import_ray()
        self.owns_connection = not ray.is_initialized()
        """Made here, so it ends here."""
        self.owns_cluster = self.owns_connection and address is None
        """The cluster too."""
        if self.owns_connection:
            with _preserve_signal_handlers():
                _init(address)
        self.callbacks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_callbacks, name="ray-callbacks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave; a cluster of our own ends."""
        self.callbacks.put(None)
        self._thread.join()
        if self.owns_connection:
            import ray

            ray.shutdown()

    def _run_callbacks(self) -> None:
        while (complete := self.callbacks.get()) is not None:
            complete()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise LaunchError("launcher=ray needs Ray, which is not installed: pip install 'dapo-rl[ray]'") from error
    return ray


def _init(address: str | None) -> None:
    import ray
    from ray._private import worker as ray_driver

    if address is not None and "://" in address:
        raise LaunchError(
            f"launcher=ray:{address}: a run is a driver of the cluster, not a Ray client; start it on one "
            "of the cluster's nodes with launcher=ray:auto or ray:HOST:PORT of the head"
        )
    try:
        if address is None:
            # Ray would start a process for each CPU, none of which has the surroundings that a worker needs
            os.environ |= {name: "0" for name in PRESTART if name not in os.environ}
        else:
            _check_reachable(address)
        ray.init(
            address="local" if address is None else address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        # it would print pages of a node's log for each worker that is lost; what happened is in WorkerDied
        ray_driver._worker_logs_enabled = False
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"Ray could not be started on this machine: {error}"
            if address is None
            else f"the Ray cluster of launcher=ray:{address} could not be joined; are the address and, with "
            f"RAY_AUTH_MODE=token, the token those of its head? {error}"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise ConnectionError or OSError where nobody listens: Ray itself would try for ever."""
    from ray._private.services import canonicalize_bootstrap_address

    found = canonicalize_bootstrap_address(address)  # `auto` is looked up
    if found is None:
        raise ConnectionError("no Ray is running on this machine")
    host, _, port = found.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


@contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """Ray takes SIGTERM for itself; a run has its own answer to it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _actor(spec: WorkerSpec, reservation: Reservation, index: int) -> Any:
    """A handle; the actor comes to life when a process has been started for it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Ray leaves CUDA_VISIBLE_DEVICES alone where no GPU was asked for
    hidden = {} if spec.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    variables = {**hidden, **spec.environment, "PYTHONPATH": import_path(spec.environment)}
    runtime_env: dict[str, Any] = {"env_vars": variables}
    if spec.python is not None:
        runtime_env["py_executable"] = spec.python
    bundle = reservation.bundles[index]
    return (
        ray.remote(WorkerActor)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle["GPU"],
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(reservation.group, placement_group_bundle_index=index),
            runtime_env=runtime_env,
        )
        .remote()
    )
