"""The HTTP server of `dapo serve`: who may ask, and the thread that listens."""

import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dapo.core.errors import ConfigError
from dapo.core.listening import open_listener
from dapo.environments.agents.dialects import DIALECTS
from dapo.environments.agents.endpoint import make_app
from dapo.environments.agents.session import AgentError

if TYPE_CHECKING:
    from dapo.start.served_model import ServedModel

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8000
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
_MAX_CONNECTIONS = 1024
_START_S = 30.0
_END_S = 2
"""How long connections may send the rest of their answers at the end."""


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a server that listens at this address."""
    return host in _LOOPBACK_NAMES


def listen(host: str, port: int | None) -> socket.socket:
    """Listen at an address; without a port at DEFAULT_PORT, or a free one if that is taken.

    Raises ConfigError if the address cannot be used.
    """
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        try:
            return open_listener(host, candidate)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(
        f"{host}, port {candidate}: {reason}; expected an address of this machine and a free port"
    )


class ModelServer:
    """Answers the requests of clients with a served model, in a thread of its own."""

    def __init__(self, served: "ServedModel", listener: socket.socket, *, key: str | None) -> None:
        """Start the thread.

        Args:
            served: the model.
            listener: the socket on which it listens.
            key: the key that clients must send; None: every program of this machine may ask, and
                pages in a browser may not.

        Raises:
            ConfigError: the server does not start.
        """
        import uvicorn

        self._served = served
        self._digest = None if key is None else _digest(key)
        app = make_app(self._find)
        config = uvicorn.Config(
            _Guard(app, served, None if key is not None else _LOOPBACK_NAMES),
            log_level="critical",
            access_log=False,
            lifespan="off",
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_END_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), daemon=True, name="dapo-serve"
        )
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise ConfigError(f"the server did not start within {_START_S:g} s")
            time.sleep(0.005)

    def close(self) -> None:
        """Take no further connections, and end those that are open."""
        self._server.should_exit = True
        self._thread.join()

    def _find(self, key: str, session: str | None) -> "ServedModel":
        """Return the model, for clients that may ask. Raises AgentError."""
        if self._digest is not None and not hmac.compare_digest(self._digest, _digest(key)):
            raise AgentError(401, "the API key is not that of this server", "invalid_api_key")
        if session is not None:
            raise AgentError(404, "a served model has no sessions; leave them out of the address")
        return self._served


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class _Guard:
    """Answers `/health`, and refuses pages of other sites in a browser of this machine.

    A page could reach the server through a name of its own that leads to this machine (DNS
    rebinding), or send a request whose answer it cannot read.
    """

    def __init__(self, app: Any, served: "ServedModel", names: Collection[str] | None) -> None:
        """Guard an ASGI application.

        Args:
            app: answers everything else.
            served: what is asked.
            names: the names of this machine that requests may use; None: any, because clients have
                a key.
        """
        self._app = app
        self._served = served
        self._names = names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        if scope["type"] != "http":
            return
        request = Request(scope)
        if not self._may_ask(request):
            error = AgentError(
                403, "requests of other sites are refused: use http://127.0.0.1 or localhost"
            )
            refusal = JSONResponse(DIALECTS[0].error(error), 403)
            await refusal(scope, receive, send)
        elif scope["path"] == "/health":
            state = {
                "status": "ok",
                "model": self._served.model,
                "open_requests": self._served.num_open,
            }
            await JSONResponse(state)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_ask(self, request: Any) -> bool:
        if self._names is None:
            return True
        origin = request.headers.get("origin")
        if origin is not None and _host_of(origin) not in self._names:
            return False
        return _host_of(f"//{request.headers.get('host', LOOPBACK)}") in self._names


def _host_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:  # brackets that do not match
        return None
