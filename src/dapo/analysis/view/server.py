"""The server of `dapo view`: it listens on 127.0.0.1 only, answers GET only, and writes nothing.

Three checks protect the texts of the runs. The Host header must name this machine, so that no other
site can reach the server through its own name (DNS rebinding). Requests from other origins are
refused. The content security policy lets the page load only its own files.
"""

import re
import socket
import threading
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dapo.analysis.view import queries, run_details
from dapo.core.errors import ConfigError, DapoError
from dapo.core.listening import open_listener
from dapo.core.terminal import to_json
from dapo.core.text import one_line

HOST = "127.0.0.1"
DEFAULT_PORT = 8020
NAMES = ("127.0.0.1", "localhost")
OF_ONE_RUN = (
    queries.metrics,
    queries.rollouts,
    queries.group,
    queries.problems,
    queries.evaluation,
    run_details.findings,
    run_details.options,
    run_details.log,
)
"""The queries that get the run which a request names, and its other parameters."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The headers of every response."""


def page_file(name: str) -> str:
    """Return the text of one of the page's own files."""
    return (files("dapo.analysis.view") / "page" / name).read_text(encoding="utf-8")


SCRIPTS = tuple(re.findall(r'src="(\w+\.js)"', page_file("index.html")))
"""The page's scripts, in their order."""


def make_app(runs: queries.Runs, *, port: int) -> ASGIApp:
    """Return the page and its data as an ASGI application for `port` of this machine."""
    routes = [
        Route("/", _text(page_file("index.html"), "text/html")),
        Route("/style.css", _text(page_file("style.css"), "text/css")),
        *(Route(f"/{name}", _text(page_file(name), "text/javascript")) for name in SCRIPTS),
    ]
    answers: dict[str, Callable[[Mapping[str, str]], Any]] = {
        "runs": lambda parameters: [run.name for run in runs.refresh()],
        "overview": lambda parameters: queries.overview(runs.refresh()),
        "evaluations": lambda parameters: {
            "evaluations": runs[parameters.get("run", "")].files.evaluations()
        },
        "paired": lambda parameters: queries.paired(runs, parameters),
    }
    for query in OF_ONE_RUN:
        answers[query.__name__] = lambda parameters, query=query: query(
            runs[parameters.get("run", "")], parameters
        )  # type: ignore[misc]
    routes += [Route(f"/api/{name}", _json(answer)) for name, answer in answers.items()]
    return _guarded(Starlette(routes=routes), port)


def serve(runs: queries.Runs, *, port: int | None, on_ready: Callable[[str], None]) -> None:
    """Serve the page until the process is interrupted; `on_ready` gets its address.

    Raises ConfigError.

    Without a port, DEFAULT_PORT is used, or a free one if that is taken.
    """
    with listen(port) as listener:
        chosen = listener.getsockname()[1]
        server = make_server(runs, port=chosen)
        on_ready(f"http://{HOST}:{chosen}/")
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        finally:
            runs.close()


def serve_in_background(runs: queries.Runs) -> str:
    """Serve the page until this process ends; return its address."""
    listener = listen(None)
    port = listener.getsockname()[1]
    threading.Thread(
        target=make_server(runs, port=port).run, args=([listener],), daemon=True
    ).start()
    return f"http://{HOST}:{port}/"


def make_server(runs: queries.Runs, *, port: int) -> Any:
    """Return a uvicorn server for the page, not running yet."""
    import uvicorn

    # a test's or a notebook's signal handlers stay: uvicorn sets its own in the main thread only
    config = uvicorn.Config(
        make_app(runs, port=port),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def listen(port: int | None) -> socket.socket:
    """Open a socket on 127.0.0.1. Raises ConfigError if the requested port is taken."""
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        try:
            return open_listener(HOST, candidate)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(
        f"port {port} of {HOST} cannot be used: {reason}; choose another --port, or leave it out"
    )


def _guarded(app: ASGIApp, port: int) -> ASGIApp:
    """Wrap the application: check every request, and add headers to every response."""
    hosts = {f"{name}:{port}" for name in NAMES}
    origins = {f"http://{host}" for host in hosts}

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        refusal = None
        if request.headers.get("host") not in hosts:
            refusal = Response(
                "This page is served to this machine only: open it as http://127.0.0.1.", 403
            )
        elif request.headers.get(
            "origin", next(iter(origins))
        ) not in origins or request.headers.get("sec-fetch-site", "none") not in (
            "same-origin",
            "none",
        ):
            refusal = Response("Requests of other sites are refused.", 403)
        elif request.method not in ("GET", "HEAD"):
            refusal = Response("This server is read only.", 405, {"Allow": "GET, HEAD"})

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (refusal or app)(scope, receive, send_with_headers)

    return guarded


def _text(text: str, kind: str) -> Callable[[Request], Response]:
    return lambda request: Response(text, media_type=kind)


def _json(answer: Callable[[Mapping[str, str]], Any]) -> Callable[[Request], Response]:
    """Return an endpoint that answers with JSON; an error is one sentence."""

    def respond(request: Request) -> Response:
        try:
            text = to_json(answer(request.query_params))
            status = 200
        except queries.InvalidParameter as error:
            text = to_json({"error": str(error)})
            status = 400
        except Exception as error:  # also of a damaged run, which must not end the page
            kind = (
                "" if isinstance(error, DapoError) else f"cannot be shown: {type(error).__name__}: "
            )
            text = to_json({"error": f"{kind}{one_line(str(error)) if kind else error}"})
            status = 404
        return Response(text, status, media_type="application/json")

    return respond
