"""Environments in worker processes: an episode whose process dies is rebuilt from its calls."""

import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dapo.core.environment import needed_environment
from dapo.core.errors import ConfigError
from dapo.core.loading import import_locations
from dapo.core.secrets import mask_text
from dapo.environments.calls import CallForm
from dapo.environments.environment import StepResult, prompt_to_json, result_to_json
from dapo.processes.frames import encode
from dapo.processes.output import WorkerOutput
from dapo.processes.pool import STARTUP_S, Call, Limits, WorkerPool
from dapo.processes.process import WorkerLost, WorkerProcess, WorkerProgram
from dapo.rewards.verdicts import problem_to_frame
from dapo.types import Problem

if TYPE_CHECKING:
    from dapo.config.environment import EnvironmentConfig
    from dapo.environments.rendering import TurnRenderer

CLOSED = "the environment pool is closed"
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
class _EpisodeCall:
    """A call of an episode as a task of the pool."""

    episode: EpisodeHandle
    message: dict[str, Any]
    answer: "Future[Answer]" = field(default_factory=Future)

    def run(self, worker: WorkerProcess, call: Call) -> bool:
        """Rebuild the episode in a new process, and make the call."""
        if self.message["call"] == "close":
            if self.episode.process is not worker:
                self.answer.set_result({})  # it ended with its process
                return False
        elif self.episode.error is not None:
            self.answer.set_result({"error": self.episode.error})
            return False
        answer = self._rebuild(worker, call) or _exchange(call, self.message)
        self.episode.process = worker
        if "error" in answer:
            self.fail(answer["error"])
            return bool(answer["needs_restart"])
        self.episode.calls.append((self.message, answer))
        self.answer.set_result(answer)
        return False

    def fail(self, reason: str) -> None:
        self.episode.error = mask_text(reason)
        self.answer.set_result({"error": self.episode.error})

    def abandon(self) -> None:
        self.answer.set_result({"error": CLOSED})

    def _rebuild(self, worker: WorkerProcess, call: Call) -> dict[str, Any] | None:
        """Repeat an episode's calls in a new process; return an error if an answer differs."""
        if self.episode.process is worker:
            return None
        for index, (message, expected) in enumerate(self.episode.calls):
            if _exchange(call, message) != expected:
                name = f"call {index} ({message['call']})"
                reason = (
                    "the environment is not deterministic: replaying the same actions with the"
                    f" same seed gave a different answer to {name}"
                )
                return {"error": reason, "needs_restart": False}
        return None


class EnvironmentPool(WorkerPool):
    """Plays episodes in `environment.workers` processes, whose number and order change no answer.

    Each call may take `environment.timeout_s`. When a process is lost, the episode that it was
    serving ends with an error, and its other episodes are rebuilt in the new process by repeating
    their calls. A repeated call that is answered differently is an error of that episode: its
    environment is not deterministic.
    """

    def __init__(
        self,
        config: "EnvironmentConfig",
        *,
        memory_gib: float,
        startup_s: float = STARTUP_S,
        output: WorkerOutput | None = None,
    ) -> None:
        """Start the workers and wait for the first one.

        Raises ConfigError if the environment cannot be used.
        """
        spec = {"name": config.name, "options": config.options, "tools": list(config.tools)}
        try:
            init_message = encode({"spec": spec, **import_locations()})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"environment.options must be JSON values: {error}") from None
        self._num_opened = 0
        self.call_form: CallForm | None = None
        """The form of calls in the chat template; set before the first episode with tools."""
        self.begun = ""
        """The beginning of each turn in the prompt, such as a thought's mark, or an empty text."""
        program = WorkerProgram(
            module="dapo.environments.worker",
            init_message=init_message,
            environment=needed_environment(
                {str(name): config.options for name in (config.name, *config.tools)}
            ),
            kind="environment",
            error=ConfigError,
        )
        limits = Limits(config.timeout_s, memory_gib, startup_s)
        try:
            super().__init__(
                program, limits, workers=config.workers, output=output, has_own_queues=True
            )
        except ConfigError as error:
            is_anonymous = str(error).startswith("the worker process")
            where = f"environment.name={config.name}: " if is_anonymous else ""
            raise ConfigError(f"{where}{error}") from None
        self.tools: list[dict[str, Any]] = self._ready["tools"]
        """The schemas of the environment's tools, for the chat template."""
        self.has_reward: bool = self._ready["has_reward"]
        """False if the environment rewards no episode: tools alone, or no `get_reward`."""

    def read_calls_as(self, renderer: "TurnRenderer") -> None:
        """Read tool calls of new episodes in the form of this renderer's chat template."""
        self.call_form = None if renderer.calls is None else renderer.calls.form
        self.begun = renderer.begun

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
        call = _EpisodeCall(episode, {"episode": episode.name, **message})
        if not self._put([call], worker=int(episode.name)):
            call.abandon()
        return call.answer

    def pop_call_s(self) -> float:
        """Return the seconds that workers have spent in calls since the last time."""
        return self._pop_calls()[1]


def _exchange(call: Call, message: Mapping[str, Any]) -> dict[str, Any]:
    answer = call(encode(message), 1)
    try:
        return _checked(message["call"], answer)
    # user code has written to the connection
    except (TypeError, ValueError, LookupError) as error:
        raise WorkerLost(f"the worker process sent an invalid answer ({error})") from None


def _checked(call: str, answer: Answer) -> dict[str, Any]:
    if "error" in answer:
        return {"error": str(answer["error"]), "needs_restart": answer["needs_restart"]}
    if call == "reset":
        return {"prompt": prompt_to_json(answer["prompt"])}
    if call == "close":
        return {}
    step = StepResult(**{item.name: answer[item.name] for item in fields(StepResult)})
    return result_to_json(step)
