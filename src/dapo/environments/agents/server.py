"""The thread that serves the endpoint, and hears from the processes of agents how they end."""

import asyncio
import hmac
import json
import resource
import socket
import threading
from contextlib import suppress
from typing import Any

from dapo.core.errors import ConfigError
from dapo.environments.agents.endpoint import Sessions, make_app
from dapo.environments.agents.session import AgentError, Outcome, Session

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 2048
"""The most open connections of all agents; beyond, idle ones are closed, the oldest first."""
MAX_HELD_BYTES = 2**30
"""The most bytes of all requests that are read or wait for their answers."""
_START_S = 30.0
_HELLO_S = 60.0
_DRAIN_ROUNDS = 16
"""Rounds of the server's loop in which a part of a request that has arrived is read: its connection
is accepted, its head is parsed, and its handler runs.
"""
_MAX_DRAINS = 256
"""The most parts of requests that are waited for: a client may send without an end."""
_MAX_LINE = 2**22
"""The longest result of an agent, in bytes."""


class AgentServer:
    """Serves the sessions of agents until it is closed."""

    def __init__(self, listen: str | None = None) -> None:
        """Start the thread.

        Args:
            listen: The address of the interface for agents elsewhere; None: loopback only.

        Raises:
            ConfigError: The address cannot be used.
        """
        self.host = listen or LOOPBACK
        self._sessions = Sessions()
        self._controls: dict[str, tuple[Session, asyncio.StreamWriter]] = {}
        self._monitors: dict[str, int] = {}
        self._bodies = _Bodies(make_app(self._sessions.find))
        self._connections: dict[Any, None] = {}
        self._listener = _bound(self.host)
        self.port = int(self._listener.getsockname()[1])
        self.control_port = 0
        self._loop = asyncio.new_event_loop()
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dapo-endpoint")
        self._thread.start()
        if not self._is_started.wait(_START_S):
            raise ConfigError(f"the endpoint of agents did not start within {_START_S:g} s")

    def url(self, session: Session) -> str:
        """Return the address for a session's agent."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/sessions/{session.id}/v1"

    def open(self, session: Session) -> None:
        self._loop.call_soon_threadsafe(self._sessions.add, session)

    def close_session(self, session: Session) -> None:
        """End a session and every process of its agent."""
        session.close()
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._forget, session)

    def monitor_of(self, session: Session) -> int | None:
        """Return the id of the process above an agent's own, once it is known."""
        return self._monitors.get(session.id)

    @property
    def num_connections(self) -> int:
        """The number of open connections to the endpoint."""
        return len(self._connections)

    def drain(self) -> None:
        """Return when the requests that have reached this machine are in their sessions."""
        asyncio.run_coroutine_threadsafe(self._bodies.drain(), self._loop).result()

    def close(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # --- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        import uvicorn

        self._stop = asyncio.Event()
        control = await asyncio.start_server(self._hear, LOOPBACK, 0, limit=_MAX_LINE)
        self.control_port = control.sockets[0].getsockname()[1]
        config = uvicorn.Config(
            self._bodies,
            http=_bounded_protocol(self._connections),
            ws="none",
            server_header=False,
            date_header=False,
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=600,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve([self._listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._is_started.set()
        await self._stop.wait()
        for _, writer in list(self._controls.values()):
            writer.close()
        server.should_exit = True
        await serving
        control.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear from the process above an agent: its id, the agent's result, how it ended."""
        session: Session | None = None
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), _HELLO_S))
            named = self._sessions.find(str(hello["key"]), None)
            is_own = hmac.compare_digest(named.id.encode(), str(hello["session"]).encode())
            # an agent, which knows its key, cannot take the place of the process above it
            if not is_own or named.id in self._controls:
                return
            session = named
            self._controls[session.id] = session, writer
            self._monitors[session.id] = int(hello["pid"])
            while line := await reader.readline():
                session.end(_outcome(json.loads(line)))
        except Exception:  # whatever an agent's process writes
            if session is not None:
                reason = "the agent wrote something else than its result to its control connection"
                session.end(Outcome(error=reason))
        finally:
            if session is not None:
                session.end(Outcome(error="the agent's process ended without a result"))
            writer.close()

    def _forget(self, session: Session) -> None:
        self._sessions.remove(session)
        self._monitors.pop(session.id, None)
        control = self._controls.pop(session.id, None)
        if control is not None:
            control[1].close()


class _Bodies:
    """The application, with the bodies of its requests counted and bounded."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._num_received = 0
        self._num_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        num_bytes = 0

        async def counted() -> Any:
            nonlocal num_bytes
            message = await receive()
            self._num_received += 1
            length = len(message.get("body", b""))
            num_bytes += length
            self._num_bytes += length
            if length and self._num_bytes > MAX_HELD_BYTES:
                raise AgentError(429, "the requests of all agents hold too many bytes; try later")
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._num_bytes -= num_bytes

    async def drain(self) -> None:
        """Return when nothing more of requests arrives."""
        for _ in range(_MAX_DRAINS):
            num_received = self._num_received
            for _ in range(_DRAIN_ROUNDS):
                await asyncio.sleep(0)
            if num_received == self._num_received:
                return


def _bounded_protocol(connections: dict[Any, None]) -> type[asyncio.Protocol]:
    """Return a protocol that keeps the number of connections, and so of descriptors, bounded.

    Open ones are in `connections`, the oldest first.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(MAX_CONNECTIONS, max(64, soft_limit // 4))

    class BoundedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(connections) >= limit:
                idle = (other for other in connections if not _is_asking(other))
                victim = next(idle, self)
                connections.pop(victim, None)
                victim.transport.abort()
            connections[self] = None

        def connection_lost(self, exc: Exception | None) -> None:
            connections.pop(self, None)
            super().connection_lost(exc)

    return BoundedProtocol


def _is_asking(connection: Any) -> bool:
    """Return True if a connection has sent a whole request, which is not answered yet."""
    cycle = connection.cycle
    return cycle is not None and not cycle.response_complete and not cycle.more_body


def _outcome(report: Any) -> Outcome:
    """Return what a line of an agent's process says: its result, or why it ended."""
    if isinstance(report, dict):
        if "error" in report:
            return Outcome(error=str(report["error"]))
        return Outcome(report["result"], is_given=report["result"] is not None)
    text, _ = report
    return Outcome(error=str(text).replace("worker process", "agent's process"))


def _bound(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"environment.listen={host}: {error.strerror}; expected the address of an interface"
            " of this machine"
        ) from None
    return listener
