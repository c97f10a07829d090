"""Agents in processes of their own, and the endpoint that they speak to."""

import shlex
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.core.environment import needed_environment
from dapo.core.errors import ConfigError
from dapo.core.loading import AGENT_PREFIX, import_locations
from dapo.environments.agents.quiet import CAN_SEE_PROCESSES, SETTLE_S, activity
from dapo.environments.agents.server import AgentServer
from dapo.environments.agents.session import NO_VARIABLES, Outcome, Session
from dapo.processes.frames import encode
from dapo.processes.output import WorkerOutput
from dapo.processes.pool import STARTUP_S, Call, Limits, WorkerPool
from dapo.processes.process import WorkerProcess, WorkerProgram
from dapo.rewards.verdicts import problem_to_frame
from dapo.types import GenerationRequest, Problem

if TYPE_CHECKING:
    from dapo.config.environment import EnvironmentConfig

_PAUSE_S = 0.01
"""The longest pause between two looks at agents that have not asked yet."""
_LOOK_S = 0.0005
"""The pause between two looks at agents that have asked, and may still do something."""
_LOADER_GIB = 1024.0
"""The memory of the process that loads the user's code and of all agents: each has its own bound."""


def without_proxy(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """Return variables with which clients reach a host themselves, not by the machine's proxy.

    Clients ask a proxy for loopback too, unless NO_PROXY has it; some read the name in small
    letters first.
    """
    result = dict(environment)
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        hosts = environment.get(name) or environment.get(other) or ""
        if hosts.strip() != "*":  # all of them
            result[name] = f"{hosts},{host}" if hosts else host
    return result


class Agent:
    """An agent that plays one episode."""

    def __init__(self, pool: "AgentPool", session: Session) -> None:
        self._pool = pool
        self.session = session

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
        trained: Sequence[float] = (),
        template_kwargs: Mapping[str, Any] = NO_VARIABLES,
        startup_s: float = STARTUP_S,
        output: WorkerOutput | None = None,
    ) -> None:
        """Load the agent's code, and start the endpoint.

        Args:
            config: The agent.
            memory_gib: The most memory of an agent, in GiB.
            trained: The temperature and top_p of training; empty: those of each request.
            template_kwargs: The run's variables of the chat template.
            startup_s: The longest time of a start, in seconds.
            output: Takes what the agents print.

        Raises ConfigError if either cannot be used.
        """
        self._trained = trained
        self._template_kwargs = template_kwargs
        self._overrides = config.foreign_sampling == "override"
        self._arrived = threading.Event()
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
        environment = needed_environment(
            {str(config.name).removeprefix(AGENT_PREFIX): config.options},
            files=[word for word in config.command if Path(word).is_file()],
        )
        program = WorkerProgram(
            module="dapo.environments.agents.worker",
            init_message=init_message,
            environment=without_proxy(environment, self.server.host),
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
            option = f"environment.name={config.name}"
            if config.name is None:
                option = f"environment.command={shlex.join(config.command)}"
            raise ConfigError(f"{option}: {error}") from None
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
        session = Session(
            "policy",
            request.temperature,
            request.top_p,
            overrides=self._overrides,
            trained=self._trained,
            template_kwargs=self._template_kwargs,
            on_arrival=self._arrived.set,
        )
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

    def settle(self, waits: Mapping[Agent, bool], timeout_s: float) -> list[Agent]:
        """Wait until agents have asked, or ended, and do nothing more until they are answered.

        Args:
            waits: The agents; True for one that may also wait for an answer that is still sampled.
            timeout_s: The longest wait for the next agent: many that start together share the
                machine's processors.

        Returns those that have settled in this time.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        num_settled = 0
        settling = _Settling(self, waits)
        while settling.look():
            now = time.monotonic()
            if len(settling.settled) > num_settled:
                num_settled = len(settling.settled)
                deadline = now + timeout_s
            if now > deadline:
                break
            settling.pause(deadline - now)
        self.waited_s += time.monotonic() - began
        return settling.settled

    def wait(self) -> None:
        """Wait until an agent asks or ends, or a moment."""
        self._arrived.wait(_PAUSE_S)
        self._arrived.clear()

    def close(self) -> None:
        super().close()
        self.server.close()


class _Settling:
    """Looks at agents until they have nothing left to do."""

    def __init__(self, pool: AgentPool, waits: Mapping[Agent, bool]) -> None:
        self._pool = pool
        self._waits = dict(waits)
        self._activities: dict[Agent, dict[str, bytes] | None] = {}
        self._arrivals: dict[Agent, int] = {}
        self.settled: list[Agent] = []

    def look(self) -> Collection[Agent]:
        """Look once, and return the agents that have not settled."""
        # what was sent before the last look is in the sessions after it
        self._pool.server.drain()
        settled = [
            agent for agent, may_wait in self._waits.items() if self._is_settled(agent, may_wait)
        ]
        for agent in settled:
            del self._waits[agent]
        self.settled += settled
        return self._waits

    def pause(self, left_s: float) -> None:
        """Let the agents run until the next look."""
        has_asked = any(
            self._can_settle(agent, may_wait) for agent, may_wait in self._waits.items()
        )
        if not has_asked:
            self._pool.wait()
        elif self._pool.sees_processes:
            time.sleep(min(left_s, _LOOK_S))
        else:
            time.sleep(min(left_s, SETTLE_S))

    def _can_settle(self, agent: Agent, may_wait: bool) -> bool:
        if agent.session.is_waiting:
            return True
        return may_wait and self._pool.server.monitor_of(agent.session) is not None

    def _is_settled(self, agent: Agent, may_wait: bool) -> bool:
        """Return True if nothing has run, or arrived, since the look before."""
        session = agent.session
        if session.is_ended:
            return True
        if not self._can_settle(agent, may_wait):
            return False
        monitor = self._pool.server.monitor_of(session)
        if monitor is not None and self._pool.sees_processes:
            last_activity = self._activities.get(agent)
            self._activities[agent] = activity(monitor)
            return bool(last_activity) and self._activities[agent] == last_activity
        num_before = self._arrivals.get(agent)
        self._arrivals[agent] = session.num_arrivals
        return num_before == session.num_arrivals
