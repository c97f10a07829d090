"""The part of the Hugging Face hub's API that an upload of a model takes, on loopback."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

USER = "jane"
_LARGE = (".safetensors",)
"""Endings of files that go to the large file storage, as the hub's .gitattributes says."""


@dataclass
class FakeRepository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class FakeHub:
    """Where it listens, whom it knows, and what it has."""

    url: str
    token: str
    may_write: bool = True
    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256."""
    paths: list[str] = field(default_factory=list)
    """Methods and paths of the requests."""


@contextmanager
def fake_hub(token: str) -> Iterator[FakeHub]:
    """A hub on which `token` is that of the user jane."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.serve()

        def do_POST(self) -> None:
            self.serve()

        def do_PUT(self) -> None:
            self.serve()

        def serve(self) -> None:
            path = urlsplit(self.path).path
            hub.paths.append(f"{self.command} {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            # the address of an upload is signed, and the token does not go there
            if self.headers.get("Authorization") != f"Bearer {hub.token}" and "/store/" not in path:
                self.answer(401, {"error": "Invalid username or password."})
                return
            self.answer(*answer_of(hub, self.command, path, body))

        def answer(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if status == 404:  # the client tells a missing repository by it
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}", token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer_of(hub: FakeHub, method: str, path: str, body: bytes) -> tuple[int, Any]:
    """Status and content."""
    if path == "/api/whoami-v2":
        return 200, {"type": "user", "name": USER}
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if path == "/api/repos/create":
        return create(hub, json.loads(body))
    if match := re.fullmatch(r"/store/(\w+)", path):
        hub.stored[match[1]] = body
        return 200, {}
    match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/.]+)(?:\.git)?(/.*)?", path)
    name, rest = (match[1], match[2] or "") if match else ("", "")
    if name not in hub.repositories:
        return 404, {"error": "Repository not found"}
    repository = hub.repositories[name]
    if rest.startswith("/preupload/"):
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(_LARGE) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        return 200, {"files": files}
    if rest == "/info/lfs/objects/batch":
        objects = [
            {**item, "actions": {"upload": {"href": f"{hub.url}/store/{item['oid']}"}}}
            for item in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}
    if rest.startswith("/commit/"):
        commit(hub, repository, body)
        return 200, {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1" * 40}
    if method == "GET":
        return 200, {"id": name, "private": repository.private, "siblings": []}
    return 404, {"error": f"unknown path {path}"}


def create(hub: FakeHub, request: dict[str, Any]) -> tuple[int, Any]:
    """Make a repository of the user; of another owner, or without the right, none."""
    owner = request.get("organization") or USER
    name = f"{owner}/{request['name']}"
    if not hub.may_write or owner != USER:
        return 403, {"error": "You don't have the rights to create a model under the namespace"}
    address = {"url": f"{hub.url}/{name}"}
    if name in hub.repositories:
        return 409, address | {"error": "You already created this model repo"}
    hub.repositories[name] = FakeRepository(private=request.get("visibility") == "private")
    return 200, address


def commit(hub: FakeHub, repository: FakeRepository, body: bytes) -> None:
    """Add the files of a commit, of which the large ones were uploaded before."""
    for line in body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "file":
            repository.files[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            content = hub.stored[value["oid"]]
            assert hashlib.sha256(content).hexdigest() == value["oid"]
            repository.files[value["path"]] = content
