"""A chat server on loopback that follows a script: in a thread, or `python chat_server.py SECONDS`
as a process.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "echo"
TOKENS = 7
"""What it says that every completion has."""
Reply = str | tuple[int, str] | None
"""The text of a completion, or a status with a body, or nothing: the connection is closed."""


@dataclass
class ChatServer:
    """Where it listens, and what it was asked."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    @property
    def texts(self) -> list[str]:
        """The user messages, in the order in which they came."""
        return [request["messages"][-1]["content"] for request in self.requests]


def completion(text: str, *, finish: str = "stop") -> str:
    """A body as the protocol has it."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": TOKENS}})


@contextmanager
def chat_server(answer: Callable[[str, int], Reply]) -> Iterator[ChatServer]:
    """`answer(message, n)` to the n-th request, from 0, with that message."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(200, json.dumps({"data": [{"id": MODEL}]}))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(state.requests)
                state.requests.append(request)
                state.headers.append(dict(self.headers))
                state.in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.in_flight)
            found: Reply = (404, "no such path")
            if self.path == "/v1/chat/completions":
                found = answer(request["messages"][-1]["content"], number)
            with lock:
                state.in_flight -= 1
            if found is None:
                self.close_connection = True
                return
            self.reply(*((200, completion(found)) if isinstance(found, str) else found))

        def reply(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = ChatServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main(seconds: float) -> None:
    """Answer `Answer: 4` after so many seconds to everything, until the standard input ends."""

    def answer(text: str, number: int) -> str:
        time.sleep(seconds)
        return "Answer: 4"

    with chat_server(answer) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(float(sys.argv[1]))
