"""Environments in worker processes: an episode whose process dies is rebuilt from its calls."""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dapo.core.errors import ConfigError, RewardError
from dapo.core.loading import import_locations
from dapo.core.secrets import mask_text
from dapo.environments.calls import CallForm
from dapo.environments.environment import StepResult, prompt_to_json, result_to_json
from dapo.rewards.verdicts import problem_to_frame
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.process import WorkerLost, WorkerProcess, encode, needed_environment
from dapo.rewards.workers.starter import MAX_RETRIES, WorkerStarter
from dapo.types import Problem

if TYPE_CHECKING:
    from dapo.config.environment import EnvironmentConfig
    from dapo.environments.rendering import TurnRenderer

STARTUP_S = 60.0  # time limit for a worker to import its environment
Answer = Mapping[str, Any]
"""An answer: the fields of a StepResult, a `prompt` after `reset`, or an `error`."""


class EpisodeHandle:
    """An episode in one of the pool's workers.

    Its calls are answered in order, each by a future.
    """

    def __init__(self, pool: "EnvironmentPool", name: str, problem: Problem, seed: int) -> None:
        self._pool = pool
        self.name = name
        self.num_calls = 0
        self.calls: list[tuple[dict[str, Any], Answer]] = []
        """The answered calls, from which another process can rebuild the episode."""
        self.process: WorkerProcess | None = None
        self.error: str | None = None
        """The reason why the episode cannot continue."""
        reading = {"form": pool.call_form, "begun": pool.begun}
        self.reset = self._submit(
            {"call": "reset", "problem": problem_to_frame(problem), "seed": seed, **reading}
        )
        """The answer of `reset`."""

    def step(self, action: str) -> "Future[Answer]":
        return self._submit({"call": "step", "action": action})

    def end(self) -> "Future[Answer]":
        return self._submit({"call": "end"})

    def close(self) -> None:
        self._submit({"call": "close"})

    def _submit(self, message: dict[str, Any]) -> "Future[Answer]":
        self.num_calls += 1
        self.latest = self._pool.submit(self, message)
        """The answer to the newest call."""
        return self.latest


@dataclass
class _Call:
    episode: EpisodeHandle
    message: dict[str, Any]
    answer: "Future[Answer]" = field(default_factory=Future)


class EnvironmentPool:
    """Plays episodes in `environment.workers` processes, whose number and order change no answer.

    Each call may take `environment.timeout_s`. A process that exceeds a limit, dies or changes its
    own state is killed with its children and replaced: the episode that it was serving ends with an
    error, and its other episodes are rebuilt in the new process by repeating their calls. A
    repeated call that is answered differently is an error of that episode: its environment is not
    deterministic. If a signal killed the process, the call is repeated, too, up to MAX_RETRIES
    times.
    """

    def __init__(
        self,
        config: "EnvironmentConfig",
        *,
        memory_gib: float,
        startup_s: float = STARTUP_S,
        output: VerifierOutput | None = None,
    ) -> None:
        """Start the workers and wait for the first one.

        Raises ConfigError if the environment cannot be used.
        """
        spec = {"name": config.name, "options": config.options, "tools": list(config.tools)}
        try:
            init_message = encode({"spec": spec, **import_locations()})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"environment.options must be JSON values: {error}") from None
        self._timeout_s = config.timeout_s
        self.output = output
        self._starter = WorkerStarter(
            init_message,
            module="dapo.environments.worker",
            environment=needed_environment(
                {str(name): config.options for name in (config.name, *config.tools)}
            ),
            memory_gib=memory_gib,
            startup_s=startup_s,
            output=output,
            kind="environment",
        )
        self._queues: list[queue.SimpleQueue[_Call | None]] = [
            queue.SimpleQueue() for _ in range(config.workers)
        ]
        self._lock = threading.Lock()
        self._closed = False
        self._num_opened = 0
        self.call_form: CallForm | None = None
        """The form of calls in the chat template; set before the first episode with tools."""
        self.begun = ""
        """The beginning of each turn in the prompt, such as a thought's mark, or an empty text."""
        self._call_s = 0.0
        started: Future[WorkerProcess] = Future()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(calls, started), daemon=True, name=f"dapo-environment-{i}"
            )
            for i, calls in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self.tools: list[dict[str, Any]] = started.result().ready["tools"]
            """The schemas of the environment's tools, for the chat template."""
        except RewardError as error:
            self.close()
            is_anonymous = str(error).startswith("the worker process")
            where = f"environment.name={config.name}: " if is_anonymous else ""
            raise ConfigError(f"{where}{error}") from None

    @property
    def worker_pids(self) -> list[int]:
        return self._starter.pids

    def read_calls_as(self, renderer: "TurnRenderer") -> None:
        """Read tool calls of new episodes in the form of this renderer's chat template."""
        self.call_form = None if renderer.calls is None else renderer.calls.form
        self.begun = renderer.begun

    def log_to(self, log: Callable[[str], None]) -> None:
        """Log lost workers by `log` instead of to the standard error."""
        self._starter.log = log

    def open(self, problem: Problem, seed: int) -> EpisodeHandle:
        """Begin an episode. Raises ConfigError for a problem whose fields are not JSON."""
        with self._lock:
            name = str(self._num_opened)
            self._num_opened += 1
        try:
            return EpisodeHandle(self, name, problem, seed)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"problem {problem.id!r} has a field that is not JSON: {error}"
            ) from None

    def submit(self, episode: EpisodeHandle, message: dict[str, Any]) -> "Future[Answer]":
        """Queue a call of an episode, see EpisodeHandle."""
        json.dumps(message)  # the thread that sends it must not fail
        call = _Call(episode, {"episode": episode.name, **message})
        with self._lock:
            if self._closed:
                call.answer.set_result({"error": "the environment pool is closed"})
            else:
                self._queues[int(episode.name) % len(self._queues)].put(call)
        return call.answer

    def pop_call_s(self) -> float:
        """Return the seconds that workers have spent in calls since the last time."""
        with self._lock:
            seconds = self._call_s
            self._call_s = 0.0
        return seconds

    def close(self) -> None:
        """Kill the workers and their descendants; pending calls are answered with an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for calls in self._queues:
            calls.put(None)
        self._starter.close()
        for thread in self._threads:
            thread.join()
        if self.output is not None:
            self.output.close()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(
        self, calls: "queue.SimpleQueue[_Call | None]", started: "Future[WorkerProcess]"
    ) -> None:
        """Run the thread of one worker."""
        standby: list[WorkerProcess] = []
        worker, reason = self._starter.spawn(standby)
        with self._lock:
            if not started.done():
                if worker is None:
                    started.set_exception(RewardError(reason))
                else:
                    started.set_result(worker)
        while (call := calls.get()) is not None:
            if self._closed:
                call.answer.set_result({"error": "the environment pool is closed"})
                continue
            began = time.monotonic()
            worker, answer = self._call(call, worker, standby)
            with self._lock:
                self._call_s += time.monotonic() - began
            if "error" in answer:
                call.episode.error = answer["error"]
            call.answer.set_result(answer)
        for last in filter(None, [worker, *standby]):
            self._starter.stop(last, graceful=last is worker)

    def _call(
        self, call: _Call, worker: WorkerProcess | None, standby: list[WorkerProcess]
    ) -> tuple[WorkerProcess | None, Answer]:
        """Answer a call, and return the worker for the next one."""
        for retries_left in range(MAX_RETRIES, -1, -1):
            if worker is not None and worker.is_lost:  # while it was idle
                self._starter.stop(worker, graceful=False)
                worker = None
            if call.message["call"] == "close":
                if worker is None or call.episode.process is not worker:
                    return worker, {}  # it ended with its process
            elif call.episode.error is not None:
                return worker, {"error": call.episode.error}
            reason = ""
            if worker is None:
                worker, reason = self._starter.spawn(standby)
            if worker is None:
                return None, {"error": f"no worker process: {reason}"}
            with self._lock:
                worker.busy = not self._closed
            try:
                answer = self._rebuild(call.episode, worker) or self._exchange(worker, call.message)
            except WorkerLost as error:
                self._starter.stop(worker, graceful=False)
                worker = None
                if not (error.is_retryable and retries_left):
                    return None, {"error": mask_text(str(error))}
                self._starter.log_loss(error)
                continue
            return self._used(call, answer, worker), answer
        raise AssertionError("the last try returns")

    def _used(
        self, call: _Call, answer: dict[str, Any], worker: WorkerProcess
    ) -> WorkerProcess | None:
        """Record an answer, and return the worker for the next call."""
        call.episode.process = worker
        if "error" in answer:
            answer["error"] = mask_text(answer["error"])
        else:
            call.episode.calls.append((call.message, dict(answer)))
        if not answer.pop("needs_restart", False):
            return worker
        self._starter.stop(worker, graceful=False)
        return None

    def _rebuild(self, episode: EpisodeHandle, worker: WorkerProcess) -> dict[str, Any] | None:
        """Repeat an episode's calls in a new process; return an error if an answer differs."""
        if episode.process is worker:
            return None
        for index, (message, expected) in enumerate(episode.calls):
            if self._exchange(worker, message) != expected:
                name = f"call {index} ({message['call']})"
                reason = (
                    "the environment is not deterministic: replaying the same actions with the"
                    f" same seed gave a different answer to {name}"
                )
                return {"error": reason}
        return None

    def _exchange(self, worker: WorkerProcess, message: Mapping[str, Any]) -> dict[str, Any]:
        slow_s = self._timeout_s
        answer = worker.call(
            encode(message), self._timeout_s, slow_s=slow_s, when_slow=lambda: None
        )
        try:
            return _checked(message["call"], answer)
        # user code has written to the connection
        except (TypeError, ValueError, LookupError) as error:
            raise WorkerLost(f"the worker process sent an invalid answer ({error})") from None


def _checked(call: str, answer: Answer) -> dict[str, Any]:
    result: dict[str, Any] = {"needs_restart": answer["needs_restart"] is True}
    if "error" in answer:
        return {"error": str(answer["error"]), **result}
    if call == "reset":
        return {"prompt": prompt_to_json(answer["prompt"]), **result}
    if call == "close":
        return result
    step = StepResult(**{item.name: answer[item.name] for item in fields(StepResult)})
    return {**result_to_json(step), **result}
