"""Evaluation through an OpenAI-compatible server: a real one on loopback that can misbehave."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dapo.cli import main
from dapo.engines.server import ServerClient, ServerOptions
from dapo.errors import ConfigError
from dapo.types import Problem

MODEL = "echo"


class Server(ThreadingHTTPServer):
    """Answers with `Answer: 4`, after what `faults` (a status, or "close", "slow", "nonsense") says first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[int | str] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.live = Counter[str]()
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.text = "Two and two.\nAnswer: 4"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers.get("authorization"))
            server.live["now"] += 1
            server.live["most"] = max(server.live["most"], server.live["now"])
            fault = server.faults.pop(0) if server.faults else None
        if fault == "slow":
            server.released.wait(20)
        with server.lock:
            server.live["now"] -= 1
        if fault == "close":
            self.close_connection = True
        elif fault == "nonsense":
            self.reply(200, {"choices": []})
        elif isinstance(fault, int):
            self.reply(fault, {"error": {"message": "come again"}})
        else:
            reason = "content_filter" if fault == "filtered" else "stop"
            choice = {"message": {"role": "assistant", "content": server.text}, "finish_reason": reason}
            self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 7}})

    def reply(self, status: int, values: dict[str, Any]) -> None:
        content = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.released.set()
    made.shutdown()
    thread.join()
    made.server_close()


def asked(server: Server, *, samples: int = 1, problems: int = 1, **options: Any) -> list[Any]:
    """What the client says of each response, in the order of problems and samples."""
    values = {"temperature": 0.5, "top_p": 0.7, "max_tokens": 9, "seed": 3, "pause_s": 0.0, **options}
    found = {}
    with ServerClient(ServerOptions(server.url, MODEL, samples, **values), lambda p: [{"role": "user"}]) as client:
        for place in range(problems):
            client.submit(place, Problem(str(place), "?", "4"))
        while len(found) < samples * problems:
            found |= {(place, i): response for place, i, response in client.poll()}
    return [found[key] for key in sorted(found)]


def test_every_sample_is_a_request_with_its_own_seed_and_the_plan(server: Server):
    responses = asked(server, samples=3, problems=2)
    assert [(r.text, r.tokens, r.finish, r.error) for r in responses] == [(server.text, 7, "stop", None)] * 6
    assert len({body["seed"] for body in server.bodies}) == 6
    assert {(b["temperature"], b["top_p"], b["max_tokens"], b["model"]) for b in server.bodies} == {
        (0.5, 0.7, 9, MODEL)
    }
    seeds = {body["seed"] for body in server.bodies}
    asked(server, samples=3, problems=2)
    assert {body["seed"] for body in server.bodies} == seeds  # the same draws every time


@pytest.mark.parametrize("fault", [500, 503, 429, "close"])
def test_a_failure_that_passes_costs_nothing_but_time(server: Server, fault: int | str):
    server.faults = [fault, fault]
    (response,) = asked(server, retries=2)
    assert (response.text, response.error) == (server.text, None)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("fault", "tries", "told"),
    [
        (500, 3, "server: status 500: come again"),
        (400, 1, "server: status 400: come again"),
        ("nonsense", 1, "server: the answer is no chat completion: {'choices': []}"),
        ("filtered", 1, "server: the response ended by 'content_filter'"),
    ],
)
def test_what_stays_wrong_is_an_error_and_not_an_empty_response(
    server: Server, fault: int | str, tries: int, told: str
):
    server.faults = [fault] * 3
    (response,) = asked(server, retries=2)
    assert (response.finish, response.error) == (None, told)
    assert len(server.bodies) == tries


def test_a_server_that_hangs_is_an_error_in_time(server: Server):
    server.faults = ["slow"]
    (response,) = asked(server, retries=0, timeout_s=0.3)
    assert response.error.startswith("server: ReadTimeoutError: Read timed out")


def test_no_more_requests_are_in_flight_than_allowed(server: Server):
    asked(server, samples=20, concurrency=3)
    assert 1 <= server.live["most"] <= 3


def test_the_key_comes_from_the_environment_only(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k-123")
    asked(server)
    assert server.keys == ["Bearer k-123"]


def test_a_wrong_model_or_address_is_told_before_anything_is_asked(server: Server):
    options = {"samples": 1, "temperature": 1.0, "top_p": 1.0, "max_tokens": 9, "seed": 0}
    with pytest.raises(ConfigError, match="has no model 'gpt'; it has echo"):
        ServerClient(ServerOptions(server.url, "gpt", **options), lambda p: [])
    with pytest.raises(ConfigError, match="cannot be reached"):
        ServerClient(ServerOptions("http://127.0.0.1:9/v1", MODEL, **options), lambda p: [])


def problems_file(path: Path) -> str:
    rows = [{"prompt": f"What is {n} + {4 - n}?", "answer": "4"} for n in range(3)] + [{"prompt": "5?", "answer": "5"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    return str(path)


def evaluated(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["eval", *arguments])
    return stopped.value.code or 0


def test_dapo_eval_judges_a_served_model(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    data, output = problems_file(tmp_path / "p.jsonl"), tmp_path / "out.json"
    command = [MODEL, "--data", data, "--server", server.url, "data.instruction=Say it.", "data.system=Be brief."]
    assert evaluated(*command, "--output", str(output)) == 0
    told = capsys.readouterr().out
    assert "holds each problem 2 times: 2 samples for each of 4 problems" in told
    assert "75.0% (25.0% to 100.0%)" in told
    result = json.loads(output.read_text())
    assert (result["accuracy"], result["cons@2"], result["response_tokens_mean"]) == (0.75, 0.75, 7)
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 0 + 4?\nSay it."},
    ]
    assert not list(tmp_path.glob("*.partial"))


def test_an_evaluation_with_over_one_percent_of_errors_says_so(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server.faults = [400]
    data = problems_file(tmp_path / "p.jsonl")
    assert evaluated(MODEL, "--data", data, "--server", server.url, "eval.server_concurrency=1") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "WARNING, over 1 % errors" in told
    assert "1 of 8 responses have no judgement: server: status 400: come again" in told


def test_two_results_are_compared_problem_by_problem(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data, first, both = problems_file(tmp_path / "p.jsonl"), tmp_path / "first.json", tmp_path / "both.json"
    server.text = "Answer: 5"
    assert evaluated(MODEL, "--data", data, "--server", server.url, "--output", str(first)) == 0
    server.text = "Answer: 4"
    compare = ["--compare", str(first), MODEL, "--data", data, "--server", server.url]
    assert evaluated(*compare, "--output", str(both)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "paired over 4 problems: +0.5000" in told
    assert "better on 3 problems, worse on 1, equal on 0" in told
    assert json.loads(both.read_text())["comparison"]["difference"] == 0.5
    assert evaluated(*compare, "train.seed=1") == 2
    assert "cannot be compared: seed is 0 in one and 1 in the other" in capsys.readouterr().err
