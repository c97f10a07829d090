"""The HTTP application of the endpoint: who asks, what is answered, and how errors look."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from dapo.core.text import quoted
from dapo.environments.agents.dialects import DIALECTS, Dialect
from dapo.environments.agents.messages import AgentRequest
from dapo.environments.agents.session import AgentError, Outcome, Pending, Session
from dapo.environments.agents.streaming import GrowingPending, grown, replayed

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BODY_BYTES = 16 * 2**20
"""The largest body of a request."""
_RETRY_AFTER_S = 1
_NO_KEYS = ("", "-", "dummy", "empty", "fake", "local", "none", "not-needed", "placeholder", "x")
"""Keys that clients send to servers that need none: the address alone names the session then."""
_CLIENT_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading a client's values may raise."""


class Asked(Protocol):
    """What answers an agent's requests: a session of an episode, or a served model."""

    model: str

    def submit(self, request: AgentRequest) -> Pending:
        """Queue a request. Raises AgentError."""


class Sessions:
    """The open sessions, found by their key or by their address."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Session] = {}
        self._by_id: dict[str, Session] = {}
        self._ended: dict[str, None] = {}
        """Ids and digests of the last sessions that ended, to say so."""

    def add(self, session: Session) -> None:
        self._by_digest[_digest(session.key)] = session
        self._by_id[session.id] = session

    def remove(self, session: Session) -> None:
        self._by_digest.pop(_digest(session.key), None)
        self._by_id.pop(session.id, None)
        self._ended[session.id] = None
        self._ended[_digest(session.key).hex()] = None
        while len(self._ended) > _MAX_ENDED:
            self._ended.pop(next(iter(self._ended)))

    def find(self, key: str, session_id: str | None) -> Session:
        """Return the session of a key, or of an address. Raises AgentError 401, 404 or 410."""
        digest = _digest(key)
        session = self._by_digest.get(digest)
        if session is not None and not hmac.compare_digest(session.key.encode(), key.encode()):
            session = None
        if session_id is None:
            if session is not None:
                return session
            if digest.hex() in self._ended:
                raise _ended()
            raise AgentError(401, "unknown API key: it is that of one episode", "invalid_api_key")
        addressed = self._by_id.get(session_id)
        if addressed is None:
            if session_id in self._ended:
                raise _ended()
            raise AgentError(404, "there is no such session", "not_found")
        if session is not addressed and key.lower() not in _NO_KEYS:
            raise AgentError(401, "the API key is not that of this session", "invalid_api_key")
        return addressed


_MAX_ENDED = 4096


def _ended() -> AgentError:
    return AgentError(410, "the episode of this key has ended", "session_ended")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def make_app(find: Callable[[str, str | None], Asked]) -> "Starlette":
    """Return the application; `find` returns what answers a key and the session of an address."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    def bound(function: Callable[..., Any], *values: Any) -> Callable[["Request"], Any]:
        return lambda request: function(request, find, *values)

    routes = []
    for prefix in ("", "/sessions/{session}"):
        models = _guarded(bound(_models))
        model = _guarded(bound(_model))
        # the SDK of Anthropic adds /v1 to an address that ends with it
        for version in (f"{prefix}/v1", f"{prefix}/v1/v1"):
            routes.append(Route(f"{version}/models", models, methods=["GET"]))
            routes.append(Route(f"{version}/models/{{model:path}}", model, methods=["GET"]))
            for dialect in DIALECTS:
                answer = _guarded(bound(_respond, dialect), dialect)
                routes.append(Route(f"{version}/{dialect.path}", answer, methods=["POST"]))
    for name, function in (("reward", _reward), ("complete", _complete)):
        paths = (f"/sessions/{{session}}/{name}", f"/sessions/{{session}}/v1/{name}")
        answer = _guarded(bound(function))
        routes += [Route(path, answer, methods=["POST"]) for path in paths]
    return Starlette(routes=routes, exception_handlers={404: _unknown_path, 405: _unknown_path})


def _unknown_path(request: "Request", error: Exception) -> "Response":
    """Answer a path, or a method, that there is not, by Starlette's HTTPException."""
    from starlette.responses import JSONResponse

    status = int(getattr(error, "status_code", 404))
    paths = ", ".join(f"POST /v1/{dialect.path}" for dialect in DIALECTS)
    missing = AgentError(
        status,
        f"there is no {request.method} {request.url.path} here; there are {paths} and GET"
        " /v1/models",
        "not_found",
    )
    return JSONResponse(DIALECTS[0].error(missing), status, getattr(error, "headers", None))


async def _models(request: "Request", find: Callable[[str, str | None], Asked]) -> "Response":
    from starlette.responses import JSONResponse

    asked = find(_key_of(request), request.path_params.get("session"))
    return JSONResponse({"object": "list", "data": [_described(asked.model)]})


async def _model(request: "Request", find: Callable[[str, str | None], Asked]) -> "Response":
    from starlette.responses import JSONResponse

    asked = find(_key_of(request), request.path_params.get("session"))
    name = request.path_params["model"]
    if name != asked.model:
        raise AgentError(404, f"there is no model {quoted(name)}, only {asked.model}", "not_found")
    return JSONResponse(_described(name))


def _described(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "dapo"}


async def _reward(request: "Request", find: Callable[[str, str | None], Asked]) -> "Response":
    from starlette.responses import JSONResponse

    session = _session_of(request, find)
    body = await _body_of(request)
    if "reward" not in body:
        raise AgentError(400, 'expected {"reward": number}')
    session.reward(body["reward"])
    return JSONResponse({"ok": True})


async def _complete(request: "Request", find: Callable[[str, str | None], Asked]) -> "Response":
    from starlette.responses import JSONResponse

    session = _session_of(request, find)
    body = await _body_of(request, may_be_empty=True)
    if body.get("reward") is not None:
        session.reward(body["reward"])
    session.end(Outcome(is_given=False))
    return JSONResponse({"ok": True})


def _guarded(
    respond: Callable[["Request"], Any], dialect: Dialect = DIALECTS[0]
) -> Callable[["Request"], Any]:
    """Answer an error in the form of the dialect."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response

    async def guarded(request: "Request") -> "Response":
        try:
            response: Response = await respond(request)
            return response
        except AgentError as error:
            failure = error
        except _CLIENT_ERRORS as error:
            failure = AgentError(400, str(error) or type(error).__name__)
        except ClientDisconnect:
            return Response(status_code=499)
        headers = {"Retry-After": str(_RETRY_AFTER_S)} if failure.status == 429 else None
        return JSONResponse(dialect.error(failure), failure.status, headers)

    return guarded


async def _respond(
    request: "Request", find: Callable[[str, str | None], Asked], dialect: Dialect
) -> "Response":
    asked = find(_key_of(request), request.path_params.get("session"))
    try:
        return await _answered(request, asked, dialect)
    except (AgentError, *_CLIENT_ERRORS) as error:
        if isinstance(asked, Session):
            asked.refuse(str(error) or type(error).__name__)
        raise


async def _answered(request: "Request", asked: Asked, dialect: Dialect) -> "Response":
    """Return the answer to a request. Raises AgentError, or an error of _CLIENT_ERRORS."""
    from starlette.responses import JSONResponse, Response, StreamingResponse

    body = await _body_of(request)
    template_kwargs = dict(_mapping_of(body, "chat_template_kwargs"))
    # some services take this one beside them
    if body.get("enable_thinking") is not None:
        template_kwargs["enable_thinking"] = body["enable_thinking"]
    agent_request = replace(
        dialect.read(body),
        model=_text_of(body, "model"),
        template_kwargs=template_kwargs,
        is_retry=_says_retry(request),
        idempotency_key=request.headers.get("idempotency-key") or None,
    )
    pending = asked.submit(agent_request)
    is_streamed = bool(body.get("stream"))
    answer: asyncio.Future[Any]
    if is_streamed and isinstance(pending, GrowingPending):
        pending.is_watched = True
        answer = asyncio.ensure_future(pending.begun.wait())
    else:
        answer = asyncio.wrap_future(pending.answers)
    disconnect: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            pending.answers.cancel()
            return Response(status_code=499)
        answer.result()  # raises what the answer has raised
    finally:
        disconnect.cancel()
        answer.cancel()
    if isinstance(pending, GrowingPending) and not pending.answers.done():
        events = grown(dialect, body, pending)
        return StreamingResponse(events, media_type="text/event-stream")
    answers = pending.answers.result()
    if not is_streamed:
        return JSONResponse(dialect.write(body, answers))

    async def replay() -> Any:
        for event in replayed(dialect, body, answers):
            yield event

    return StreamingResponse(replay(), media_type="text/event-stream")


def _text_of(body: Mapping[str, Any], name: str) -> str | None:
    """Return a text of a request; None for any other value."""
    value = body.get(name)
    return value if isinstance(value, str) else None


def _mapping_of(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of a request; empty for any other value."""
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}


async def _disconnected(request: "Request") -> None:
    """Wait until the client has gone."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


async def _body_of(request: "Request", *, may_be_empty: bool = False) -> Mapping[str, Any]:
    """Return the JSON object of a request. Raises AgentError."""
    parts = bytearray()
    async for chunk in request.stream():
        parts += chunk
        if len(parts) > MAX_BODY_BYTES:
            raise AgentError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    if may_be_empty and not parts:
        return {}
    try:
        body = json.loads(bytes(parts))
    except (ValueError, RecursionError) as error:
        raise AgentError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, Mapping):
        raise AgentError(400, f"the body is {type(body).__name__}, expected an object")
    return body


def _key_of(request: "Request") -> str:
    """Return the API key of a request, as the SDKs of OpenAI and Anthropic send it."""
    header = request.headers.get("authorization", "")
    scheme, _, token = header.partition(" ")
    if scheme.lower() == "bearer":
        return str(token.strip())
    return str(request.headers.get("x-api-key", header))


def _session_of(request: "Request", find: Callable[[str, str | None], Asked]) -> Session:
    """Return the session of a request. Raises AgentError for a served model."""
    asked = find(_key_of(request), request.path_params.get("session"))
    if not isinstance(asked, Session):
        raise AgentError(404, "a served model takes no rewards", "not_found")
    return asked


def _says_retry(request: "Request") -> bool:
    """Return True if the client says that it sends a request again."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdigit() and int(count) > 0
