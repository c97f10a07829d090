"""What a foreign server says is bounded: the waits that it names, and each field of its answers."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.error import HTTPError

import pytest

from dapo.core.http_client import ServerFailed
from dapo.core.openai_client import TOTAL_S, ChatClient, Completion
from dapo.core.waiting import Interrupted, SignalFlag, SystemClock
from dapo.training.checkpoint_writer import ConnectionFailed, StorageError, os_errors_as_dapo_errors
from helpers.tables import for_each_row

NOW = 1_800_000_000.0
OK = {
    "choices": [{"message": {"content": "4"}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 7},
}


class HandClock(SystemClock):
    """Its time passes by its own waits only."""

    def __init__(self, signum_at: int | None = None) -> None:
        super().__init__(SignalFlag())
        self.now = 0.0
        self.waits = []
        self.shown = []
        self.signum_at = signum_at

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return NOW

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if len(self.waits) == self.signum_at:
            self.stop.raise_now(signal.SIGTERM)
        self.stop.check()
        self.now += seconds

    def show(self, text: str) -> None:
        self.shown.append(text)


@contextmanager
def answering(*replies: tuple[int, dict[str, str], bytes]) -> Iterator[str]:
    """A server that gives these answers in turn, the last one for ever."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *details: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            # a thread that serves a closed socket never waits, and slows all later tests down
            server.shutdown()


def asked(headers: dict[str, str], clock: HandClock, status: int = 429) -> Completion:
    with answering((status, headers, b"busy"), (200, {}, json.dumps(OK).encode())) as url:
        return ChatClient(url, "m", clock=clock).complete([])


@for_each_row("status", [429, 503])
@for_each_row(
    ("headers", "wait_s"),
    [
        ({}, 0.5),
        ({"Retry-After": "0"}, 0.5),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After": "300"}, 300.0),
        ({"retry-after-ms": "2500"}, 2.5),
        ({"retry-after-ms": "2500", "Retry-After": "9"}, 9.0),
        ({"Retry-After": formatdate(NOW + 60, usegmt=True)}, 60.0),
        ({"Retry-After": formatdate(NOW - 60, usegmt=True)}, 0.5),
        *[
            ({"Retry-After": text}, 0.5)
            for text in ("-5", "-1e400", "nan", "soon", "", "5, 6", "Mon, 99 Foo", "0x10")
        ],
        *[
            ({name: "1000000"}, 0.5)
            for name in ("x-ratelimit-reset", "x-ratelimit-reset-requests", "X-Wait")
        ],
    ],
)
def test_a_server_is_waited_for_as_it_asks_and_a_senseless_wish_is_none(status, headers, wait_s):
    clock = HandClock()
    assert asked(headers, clock, status).text == "4"
    assert (
        clock.waits == [pytest.approx(wait_s, abs=1)] if wait_s == 60 else clock.waits == [wait_s]
    )
    assert len(clock.shown) == (wait_s >= 5)


@pytest.mark.parametrize(
    ("headers", "wish"),
    [
        ({"Retry-After": "1000000"}, "11.6 days"),
        ({"Retry-After": "301"}, "5 min"),
        ({"Retry-After": "1e400"}, "endless time"),
        ({"Retry-After": "inf"}, "endless time"),
        ({"Retry-After": "9" * 5000}, "endless time"),
        ({"retry-after-ms": "1000000000"}, "11.6 days"),
        ({"Retry-After": formatdate(NOW + 7200, usegmt=True)}, "2.0 h"),
    ],
)
def test_a_longer_wish_than_five_minutes_is_an_error_at_once_that_names_it(headers, wish):
    clock = HandClock()
    with pytest.raises(
        ServerFailed,
        match=rf"status 429, and the server asks to wait {wish}; the longest wait is 5 min",
    ):
        asked(headers, clock)
    assert clock.waits == []


def test_all_tries_of_a_request_together_end_in_time():
    clock = HandClock()
    with (
        answering((503, {"Retry-After": "299"}, b"busy")) as url,
        pytest.raises(ServerFailed, match="status 503"),
    ):
        ChatClient(url, "m", retries=1000, clock=clock).complete([])
    assert sum(clock.waits) <= TOTAL_S


def test_a_signal_ends_a_wait_at_once():
    clock = HandClock(signum_at=2)
    with answering((429, {"Retry-After": "200"}, b"")) as url, pytest.raises(Interrupted) as error:
        ChatClient(url, "m", clock=clock).complete([])
    assert error.value.exit_code == 128 + signal.SIGTERM
    assert len(clock.waits) == 2


def changed(path: tuple[str | int, ...], text: str) -> bytes:
    """The good answer with this JSON text at a path."""
    values = json.loads(json.dumps(OK))
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "HERE"
    return json.dumps(values).replace('"HERE"', text).encode()


CONTENT = ("choices", 0, "message", "content")
COUNT = ("usage", "completion_tokens")
DEEP = "[" * 100_000 + "]" * 100_000


@for_each_row(
    ("path", "text"),
    [
        *[
            (CONTENT, text)
            for text in ("false", "{}", "0", "[]", "true", "1e400", "NaN", '[{"text": "4"}]', DEEP)
        ],
        *[
            (COUNT, text)
            for text in (
                "1e400",
                "-1e400",
                "NaN",
                "-5",
                "true",
                "1.5",
                '"7"',
                "[]",
                "1e30",
                "9" * 4000,
            )
        ],
        *[(("choices", 0, "finish_reason"), text) for text in ("0", "false", "{}", "[]")],
        *[(("choices", 0, "message"), text) for text in ("null", "[]", '"4"')],
        *[(("choices",), text) for text in ("null", "{}", "[]", '"4"', "[null]")],
        (("usage",), "5"),
        (("usage",), "[1]"),
    ],
)
def test_a_field_of_another_type_or_range_is_an_error_and_never_an_empty_text(path, text):
    with (
        answering((200, {}, changed(path, text))) as url,
        pytest.raises(ServerFailed, match="not a chat completion"),
    ):
        ChatClient(url, "m").complete([])


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (CONTENT, "null", Completion("", 7, "stop")),
        (CONTENT, '"a\\ud800b"', Completion("a?b", 7, "stop")),
        (COUNT, "null", Completion("4", 0, "stop")),
        (COUNT, "12.0", Completion("4", 12, "stop")),
        (("usage",), "null", Completion("4", 0, "stop")),
        (("choices", 0, "finish_reason"), "null", Completion("4", 7, "stop")),
    ],
)
def test_what_servers_may_leave_out_is_read(path, text, expected):
    with answering((200, {}, changed(path, text))) as url:
        assert ChatClient(url, "m").complete([]) == expected


@for_each_row(
    "value", ["7.5", '"-1"', "-1e300", "true", "null", "NaN", "Infinity", "-1e400", "{}", "0.01"]
)
def test_what_is_no_log_probability_is_an_error(value):
    body = '{"choices": [{"logprobs": {"token_logprobs": [null, -0.5, HERE]}}]}'.replace(
        "HERE", value
    ).encode()
    with answering((200, {}, body)) as url, pytest.raises(ServerFailed, match="log-probability 2"):
        ChatClient(url, "m").prompt_logprobs([1, 2, 3])


def test_rounding_above_zero_is_zero_and_the_generated_token_is_left_out():
    body = b'{"choices": [{"logprobs": {"token_logprobs": [null, 1e-6, -2, -3]}}]}'
    with answering((200, {}, body)) as url:
        assert ChatClient(url, "m").prompt_logprobs([1, 2, 3]) == ([0.0, -2.0], [])


@pytest.mark.parametrize(
    "body", [DEEP.encode(), b"{}", b'{"data": [{"id": 5}]}', b'{"data": 5}', b"nonsense", b"\xff"]
)
def test_a_list_of_models_that_cannot_be_read_is_none(body):
    with answering((200, {}, body)) as url:
        assert ChatClient(url, "m").models() is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(28, "No space left on device"), StorageError),
        (OSError(30, "Read-only file system", "x"), StorageError),
        (PermissionError(13, "Permission denied", "x"), StorageError),
        (TimeoutError(110, "Connection timed out", "a file of NFS"), StorageError),
        (ConnectionResetError(104, "Connection reset by peer"), ConnectionFailed),
        (BrokenPipeError(32, "Broken pipe"), ConnectionFailed),
        (TimeoutError("timed out"), ConnectionFailed),
        (OSError("We couldn't connect to the hub"), ConnectionFailed),
        (HTTPError("http://x", 503, "busy", {}, None), ConnectionFailed),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_only_an_error_of_files_is_called_one(error, kind):
    with pytest.raises(kind) as raised, os_errors_as_dapo_errors():
        raise error
    assert ("free space" in str(raised.value)) == (kind is StorageError)
