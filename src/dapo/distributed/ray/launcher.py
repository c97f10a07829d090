"""`launcher: ray`: workers are actors on a Ray cluster, which may be started for the run."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import dapo
from dapo.config import Config
from dapo.core.errors import LaunchError, WorkerDied, WorkerFault
from dapo.core.files import make_private_folder
from dapo.core.text import one_line, shorten
from dapo.distributed.launch import import_path, wait_until_ready
from dapo.distributed.protocol import Node, WorkerSpec
from dapo.distributed.ray.actor import ActorInfo, WorkerActor
from dapo.distributed.ray.cluster import PrivateCluster, connect, describe_exposure, import_ray
from dapo.distributed.ray.placement import Reservation, cluster_nodes, reserve
from dapo.distributed.ray.weights import RayWeights
from dapo.distributed.weight_files import WeightsFolder
from dapo.engines.engine import WeightSource
from dapo.processes.output import log_tail

MAX_CAUSE_CHARS = 400


class RayWorker:
    """A worker in a Ray actor. A dead actor is not restarted: the caller starts another worker."""

    def __init__(
        self,
        name: str,
        actor: Any,
        reservation: Reservation,
        gpus: float,
        callbacks: ThreadPoolExecutor,
    ) -> None:
        self.name = name
        self.gpus = gpus
        # set when the actor's process has answered the handshake
        self.info: ActorInfo | None = None
        self._actor = actor
        self._reservation = reservation
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._pending: dict[Future[Any], Sequence[Any]] = {}
        """The pending calls with their arguments, which keep published weights alive."""
        self.exit_message: str | None = None

    @property
    def pid(self) -> int:
        return self.known_info.pid

    @property
    def log(self) -> Path:
        return self.known_info.log

    def call(self, method: str, /, *arguments: Any, **options: Any) -> "Future[Any]":
        """Like Worker.call; a positional argument may be published weights.

        Raises EngineError if they are gone.
        """
        sent = []
        for argument in arguments:
            if isinstance(argument, RayWeights):
                argument = argument.for_worker(reads_files=self.known_info.reads_files)
            sent.append(argument)
        return self.send("call", method, sent, options)

    def send(self, entry: str, /, *arguments: Any) -> "Future[Any]":
        """Call one of WorkerActor's own methods."""
        future: Future[Any] = Future()
        with self._lock:
            if self.exit_message is not None:
                future.set_exception(WorkerDied(self.exit_message))
                return future
            reference = getattr(self._actor, entry).remote(*arguments)
            self._pending[future] = arguments

        def completed(done: "Future[Any]") -> None:
            with suppress(RuntimeError):  # the launcher is closed, and so the call has failed
                # Ray's own thread must not wait
                self._callbacks.submit(self._complete, future, done)

        reference.future().add_done_callback(completed)
        return future

    def kill(self) -> None:
        self._mark_dead(f"{self.name} was ended by this run")

    close = kill

    @property
    def known_info(self) -> ActorInfo:
        assert self.info is not None, f"{self.name} has not answered the handshake"
        return self.info

    def _complete(self, future: "Future[Any]", done: "Future[Any]") -> None:
        from ray.exceptions import RayActorError, RayTaskError, RuntimeEnvSetupError

        error = done.exception()
        if isinstance(error, RuntimeEnvSetupError):
            self._mark_dead(
                f"the runtime environment of {self.name} could not be set up: {error}", LaunchError
            )
        elif isinstance(error, RayActorError) and error.actor_init_failed:
            self._mark_dead(f"{self.name} could not be set up on its node: {error}", LaunchError)
        elif isinstance(error, RayTaskError):
            self._resolve(
                future,
                WorkerFault(f"{self.name}: the arguments or the answer cannot be sent: {error}"),
            )
        elif error is not None:
            self._mark_dead(self._exit_reason(error))
        else:
            self._resolve(future, done.result()[1])

    def _resolve(self, future: "Future[Any]", value: Any) -> None:
        with self._lock:
            if future not in self._pending:
                return  # failed already, with the worker
            del self._pending[future]
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _mark_dead(self, cause: str, kind: type[Exception] = WorkerDied) -> None:
        """Kill the actor, release its resources and fail the pending calls."""
        import ray

        with self._lock:
            if self.exit_message is not None:
                return
            self.exit_message = cause
            pending = self._pending
            self._pending = {}
        try:
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)
                self._reservation.release()
        finally:
            for future in pending:
                future.set_exception(kind(cause))

    def _exit_reason(self, error: BaseException) -> str:
        from ray.exceptions import ActorUnavailableError

        where = f" (process {self.info.pid} on node {self.info.node})" if self.info else ""
        text = str(error)
        if isinstance(error, ActorUnavailableError):
            how = "is out of reach, perhaps with its node"
            cause = text.partition("RpcError: ")[2]
        else:
            how = "is gone"
            cause = text.partition("because ")[2]
        message = f"{self.name}{where} {how}: {shorten(one_line(cause or text), MAX_CAUSE_CHARS)}"
        if self.info is None:
            return message
        log = self.info.log
        return message + (log_tail(log) if log.exists() else f"; its log is {log} on that node")


class RayLauncher:
    """Starts actors on a Ray cluster.

    An actor prints to `logs/NAME.log` if its node sees that folder.

    Without `address`, Ray is started on this machine and stopped by `close`; processes then share
    the CPUs as without Ray, and only GPUs are counted. A cluster or connection that existed before
    is left as it was.
    """

    def __init__(
        self,
        logs: Path,
        *,
        timeout_s: float,
        address: str | None = None,
        use_shared_memory: bool = True,
    ) -> None:
        """Start workers on a Ray cluster.

        Args:
            logs: the folder of the workers' logs.
            timeout_s: bounds a start, until all objects exist.
            address: a cluster's `HOST:PORT`, or `auto`.
            use_shared_memory: whether workers that see this machine's shared memory get weights
                through it; others get them through Ray's object store.
        """
        self._logs = logs.resolve()
        self._timeout_s = timeout_s
        self._address = address
        self._use_shared_memory = use_shared_memory
        self._callbacks: ThreadPoolExecutor | None = None
        self._owns_connection = False
        self._private: PrivateCluster | None = None
        self._workers: list[RayWorker] = []
        self._bundles: dict[str, tuple[Reservation, int]] = {}  # the last one of each worker
        self._weights = WeightsFolder()

    @property
    def nodes(self) -> list[Node]:
        """Return the live nodes of the cluster. Raises LaunchError if it cannot be reached."""
        self._connect()
        return cluster_nodes()

    def exposure_note(self, config: Config) -> str | None:
        """Describe connections between machines that carry no secret; None without any.

        Raises LaunchError as `nodes`.
        """
        self._connect()
        import ray
        from ray import _raylet

        raylet: Any = _raylet
        machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        has_token = raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN
        return describe_exposure(config, machines=len(machines), has_token=has_token)

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[RayWorker]:
        self._connect()
        assert self._callbacks is not None
        since = time.monotonic()
        make_private_folder(self._logs)
        self._workers = [worker for worker in self._workers if worker.exit_message is None]
        # a lost worker returns to the GPUs that others still use
        for name, spec in zip(names, specs, strict=True):
            bundle = self._take_bundle(name, spec)
            if bundle is not None and bundle[0].join():
                self._bundles[name] = bundle
        new = {
            name: spec for name, spec in zip(names, specs, strict=True) if name not in self._bundles
        }
        gpus_left = None
        if self._private is not None:
            gpus_left = sum(n.gpus for n in self.nodes) - sum(w.gpus for w in self._workers)
        reservations = reserve(
            list(new),
            list(new.values()),
            together=together,
            timeout_s=self._timeout_s,
            counts_cpus=self._private is None,
            gpus_left=gpus_left,
        )
        self._bundles |= dict(zip(new, reservations, strict=True))
        workers = [
            RayWorker(
                name, self._start(name, spec), self._bundles[name][0], spec.gpus, self._callbacks
            )
            for name, spec in zip(names, specs, strict=True)
        ]
        self._workers += workers
        try:
            self._wait_until_ready(workers, specs, since)
        except BaseException:
            if self._private is not None:
                self._private.keeps_logs = True
            for worker in workers:
                worker.kill()
            raise
        return workers

    def publish_weights(self, weights: WeightSource, version: int) -> RayWeights:
        return RayWeights(self._weights.write(weights, version), timeout_s=self._timeout_s)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        if self._callbacks is not None:
            self._callbacks.shutdown()
            self._callbacks = None
            if self._owns_connection:
                import_ray().shutdown()
        if self._private is not None:
            self._private.close()
            self._private = None
        self._weights.close()

    def _wait_until_ready(
        self, workers: Sequence[RayWorker], specs: Sequence[WorkerSpec], since: float
    ) -> None:
        wait = partial(wait_until_ready, since=since, timeout_s=self._timeout_s)
        folder = self._weights.path if self._use_shared_memory else None
        logs = "Ray's logs" if self._private is None else self._private.logs
        handshakes = [
            worker.send("handshake", worker.name, self._logs, folder) for worker in workers
        ]
        for worker, handshake in zip(workers, handshakes, strict=True):
            info = wait(
                handshake, what=f"{worker.name} is scheduled, but its process", see=f"see {logs}"
            )
            if info.version != dapo.__version__:
                versions = (
                    f"node {info.node} has dapo {info.version}, this machine {dapo.__version__}"
                )
                raise LaunchError(f"{versions}; install the same version on all nodes")
            worker.info = info
        pairs = zip(workers, specs, strict=True)
        created = [
            worker.send("create", spec.factory, dict(spec.options)) for worker, spec in pairs
        ]
        for worker, future in zip(workers, created, strict=True):
            wait(future, what=worker.name, see=f"its output is in {worker.log}")

    def _take_bundle(self, name: str, spec: WorkerSpec) -> tuple[Reservation, int] | None:
        """Take the bundle of a lost worker, or look up the one that it shares."""
        if spec.shares is None:
            return self._bundles.pop(name, None)
        return self._bundles[spec.shares[0]]

    def _start(self, name: str, spec: WorkerSpec) -> Any:
        """Start the actor in the worker's bundle, on GPUs of its own or of another worker."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        reservation, index = self._bundles[name]
        gpus = ""
        amounts = reservation.bundles[index]
        if spec.shares is not None:
            owner = next(worker for worker in self._workers if worker.name == spec.shares[0])
            gpus = owner.known_info.gpus[spec.shares[1]]
            amounts = {"CPU": 0.0, "GPU": 0.0}
        # Ray leaves CUDA_VISIBLE_DEVICES unchanged for an actor without GPUs
        visible = {} if amounts["GPU"] else {"CUDA_VISIBLE_DEVICES": gpus}
        variables = {
            **visible,
            **spec.environment,
            "PYTHONPATH": import_path(spec),
            "PYTHONSAFEPATH": "1",
        }
        runtime_env: dict[str, Any] = {"env_vars": variables}
        if spec.python is not None:
            runtime_env["py_executable"] = spec.python
        actor = ray.remote(WorkerActor).options(
            num_cpus=amounts["CPU"],
            num_gpus=amounts["GPU"],
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(reservation.group, index),
            runtime_env=runtime_env,
        )
        return actor.remote(tuple(spec.secrets))

    def _connect(self) -> None:
        if self._callbacks is not None:
            return
        self._owns_connection = not import_ray().is_initialized()
        if self._owns_connection:
            self._private = connect(self._address)
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix="ray-callbacks")
