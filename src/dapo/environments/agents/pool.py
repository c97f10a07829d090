"""Agents in processes of their own, and the endpoint that they speak to."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.core.environment import needed_environment
from dapo.core.errors import ConfigError
from dapo.core.loading import import_locations
from dapo.environments.agents.quiet import CAN_SEE_PROCESSES, SETTLE_S, activity
from dapo.environments.agents.server import AgentServer
from dapo.environments.agents.session import Outcome, Session
from dapo.processes.frames import encode
from dapo.processes.output import WorkerOutput
from dapo.processes.pool import STARTUP_S, Call, Limits, WorkerPool
from dapo.processes.process import WorkerProcess, WorkerProgram
from dapo.rewards.verdicts import problem_to_frame
from dapo.types import GenerationRequest, Problem

if TYPE_CHECKING:
    from dapo.config.environment import EnvironmentConfig

_PAUSE_S = 0.01
"""The pause between two looks at an agent that has nothing to do and has not asked either."""
_LOADER_GIB = 1024.0
"""The memory of the process that loads the user's code and of all agents: each has its own bound."""


class Agent:
    """An agent that plays one episode."""

    def __init__(self, pool: "AgentPool", session: Session) -> None:
        self._pool = pool
        self.session = session

    def settle(self, timeout_s: float, *, may_wait: bool) -> bool:
        """Wait until the agent has asked, or ended, and does nothing more until it is answered.

        Args:
            timeout_s: The longest wait.
            may_wait: Whether it may also wait for an answer that is still sampled.

        Returns False if the time is over.
        """
        began = time.monotonic()
        try:
            return self._settle(began + timeout_s, may_wait=may_wait)
        finally:
            self._pool.waited_s += time.monotonic() - began

    def _settle(self, deadline: float, *, may_wait: bool) -> bool:
        server = self._pool.server
        last_activity: dict[str, str] | None = None
        num_arrivals = -1
        while True:
            if self.session.is_ended:
                server.drain()
                return True
            monitor = server.monitor_of(self.session)
            if not self.session.is_waiting:
                self.session.wait(_PAUSE_S)
            if monitor is not None and self._pool.sees_processes:
                server.drain()
                now = activity(monitor)
                if now and now == last_activity:
                    server.drain()
                    if self.session.is_waiting or may_wait:
                        return True
                last_activity = now
            elif monitor is not None or self.session.is_waiting:
                before = num_arrivals
                num_arrivals = self.session.num_arrivals
                if num_arrivals == before and (self.session.is_waiting or may_wait):
                    return True
                time.sleep(SETTLE_S)
            if time.monotonic() > deadline:
                return False

    def close(self) -> None:
        """End the agent and every process that it started."""
        self._pool.server.close_session(self.session)


@dataclass
class _Start:
    """The start of an agent, as a task of the pool."""

    message: dict[str, Any]
    session: Session
    started: "Future[None]" = field(default_factory=Future)

    def run(self, worker: WorkerProcess, call: Call) -> bool:
        answer = call(encode(self.message), 1)
        if "error" in answer:
            self.fail(str(answer["error"]))
        return False

    def fail(self, reason: str) -> None:
        self.session.end(Outcome(error=f"the agent did not start: {reason}"))

    def abandon(self) -> None:
        self.fail("the pool is closed")


class AgentPool(WorkerPool):
    """Starts agents: a process that has loaded the user's code forks one for each episode.

    So a start takes milliseconds, no state goes from one episode to another, and the processes and
    connections of an episode end with it.
    """

    def __init__(
        self,
        config: "EnvironmentConfig",
        *,
        memory_gib: float,
        startup_s: float = STARTUP_S,
        output: WorkerOutput | None = None,
    ) -> None:
        """Load the agent's code, and start the endpoint.

        Raises ConfigError if either cannot be used.
        """
        self._overrides = config.foreign_sampling == "override"
        self.sees_processes = CAN_SEE_PROCESSES and config.listen is None
        self.server = AgentServer(config.listen)
        spec = {
            "name": config.name,
            "command": list(config.command),
            "options": config.options,
            "memory_gib": memory_gib,
            "control_port": self.server.control_port,
        }
        try:
            init_message = encode({"spec": spec, **import_locations()})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"environment.options must be JSON values: {error}") from None
        program = WorkerProgram(
            module="dapo.environments.agents.worker",
            init_message=init_message,
            environment=needed_environment(
                {str(config.name).removeprefix("agent:"): config.options},
                files=[word for word in config.command if Path(word).is_file()],
            ),
            kind="agent",
            error=ConfigError,
        )
        limits = Limits(config.timeout_s, _LOADER_GIB, startup_s)
        try:
            super().__init__(
                program, limits, workers=config.workers, output=output, has_own_queues=True
            )
        except ConfigError as error:
            self.server.close()
            is_anonymous = str(error).startswith("the worker process")
            where = f"environment.name={config.name}: " if is_anonymous else ""
            raise ConfigError(f"{where}{error}") from None
        self._num_opened = 0
        self.waited_s = 0.0
        """The seconds that the engine has waited for agents."""

    def pop_call_s(self) -> float:
        """Return the seconds that the engine has waited for agents since the last time."""
        waited_s = self.waited_s
        self.waited_s = 0.0
        return waited_s

    def open(self, problem: Problem, seed: int, request: GenerationRequest) -> Agent:
        """Start an agent for a problem. Raises ConfigError for fields that are not JSON."""
        session = Session("policy", request.temperature, request.top_p, overrides=self._overrides)
        self.server.open(session)
        message = {
            "problem": problem_to_frame(problem),
            "seed": seed,
            "session": session.id,
            "key": session.key,
            "url": self.server.url(session),
        }
        task = _Start(message, session)
        self._num_opened += 1
        if not self._put([task], worker=self._num_opened):
            task.abandon()
        return Agent(self, session)

    def wait(self) -> None:
        """Wait a moment for whatever agents do."""
        time.sleep(_PAUSE_S)

    def close(self) -> None:
        super().close()
        self.server.close()
