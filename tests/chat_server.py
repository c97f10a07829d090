"""A chat server on loopback that follows a script."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = str | tuple[int, str]
"""The text of a completion, or a status with a body."""


@dataclass
class ChatServer:
    """Where it listens, and what it was asked."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The user messages, in the order in which they came."""
        return [request["messages"][-1]["content"] for request in self.requests]


@contextmanager
def chat_server(answer: Callable[[str, int], Reply]) -> Iterator[ChatServer]:
    """`answer(message, n)` to the n-th request, from 0, with that message."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(state.requests)
                state.requests.append(request)
                state.headers.append(dict(self.headers))
            reply = (404, "no such path")
            if self.path == "/v1/chat/completions":
                reply = answer(request["messages"][-1]["content"], number)
            if isinstance(reply, str):
                reply = 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]})
            body = reply[1].encode()
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = ChatServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
