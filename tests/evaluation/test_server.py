"""Evaluation through an OpenAI-compatible server: a real one on loopback that can misbehave."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dapo.cli.main import main
from dapo.core.errors import ConfigError
from dapo.evaluation.evaluate import Response
from dapo.evaluation.scores import EvaluationPlan
from dapo.evaluation.server import ServerSampler
from dapo.types import Problem
from helpers.fake_chat_server import MODEL, ChatServer, Reply, chat_server, completion
from helpers.fork_server import ForkServer
from helpers.paths import TESTS


class FaultyReplies:
    """What the server says: `text`, after what `faults` (a status, or "close", "slow", "nonsense")
    says first.
    """

    def __init__(self) -> None:
        self.faults: list[int | str] = []
        self.text = "Two and two.\nAnswer: 4"
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.seen: ChatServer

    @property
    def url(self) -> str:
        return self.seen.url

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return self.seen.requests

    def __call__(self, message: str, number: int) -> Reply:
        with self.lock:
            fault = self.faults.pop(0) if self.faults else None
        if fault == "slow":
            self.released.wait(20)
        if fault == "close":
            return None
        if fault == "nonsense":
            return 200, json.dumps({"choices": []})
        if isinstance(fault, int):
            return fault, json.dumps({"error": {"message": "come again"}})
        return 200, completion(
            self.text, finish="content_filter" if fault == "filtered" else "stop"
        )


@pytest.fixture
def server() -> Iterator[FaultyReplies]:
    faults = FaultyReplies()
    with chat_server(faults) as faults.seen:
        yield faults
        faults.released.set()


def plan(samples: int = 1) -> EvaluationPlan:
    return EvaluationPlan("toy", samples, 0.5, 0.7, 9, (), 3)


def asked(
    server: FaultyReplies, *, samples: int = 1, problems: int = 1, **options: Any
) -> list[Response]:
    """The responses of the server, in the order of problems and samples."""
    found = {}
    options = {"backoff_s": 0.0, **options}
    sampler = ServerSampler(
        server.url, MODEL, plan(samples), lambda p: [{"role": "user", "content": "?"}], **options
    )
    with closing(sampler):
        for index in range(problems):
            sampler.submit(index, Problem(str(index), "?", "4"))
        while len(found) < samples * problems:
            found |= {(index, i): response for index, i, response in sampler.poll()}
    return [found[key] for key in sorted(found)]


def test_every_sample_is_a_request_with_its_own_seed_and_the_plan(server: FaultyReplies):
    responses = asked(server, samples=3, problems=2)
    assert [(r.text, r.tokens, r.finish, r.error) for r in responses] == [
        (server.text, 7, "stop", None)
    ] * 6
    assert len({body["seed"] for body in server.bodies}) == 6
    assert {(b["temperature"], b["top_p"], b["max_tokens"], b["model"]) for b in server.bodies} == {
        (0.5, 0.7, 9, MODEL)
    }
    seeds = {body["seed"] for body in server.bodies}
    asked(server, samples=3, problems=2)
    assert {body["seed"] for body in server.bodies} == seeds  # the same draws every time


@pytest.mark.parametrize("fault", [500, 503, 429, "close"])
def test_a_failure_that_passes_costs_nothing_but_time(server: FaultyReplies, fault: int | str):
    server.faults = [fault, fault]
    (response,) = asked(server, retries=2)
    assert (response.text, response.error) == (server.text, None)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("fault", "tries", "message"),
    [
        (500, 3, "server: status 500: come again"),
        (400, 1, "server: status 400: come again"),
        (
            "nonsense",
            1,
            'server: the answer is not a chat completion: it has no choices[0]: {"choices": []}',
        ),
        ("filtered", 1, "server: the response ended by 'content_filter'"),
    ],
)
def test_what_stays_wrong_is_an_error_and_not_an_empty_response(
    server: FaultyReplies, fault: int | str, tries: int, message: str
):
    server.faults = [fault] * 3
    (response,) = asked(server, retries=2)
    assert (response.finish, response.error) == (None, message)
    assert len(server.bodies) == tries


def test_a_server_that_hangs_is_an_error_in_time(server: FaultyReplies):
    server.faults = ["slow"]
    (response,) = asked(server, retries=0, timeout_s=0.3)
    assert response.error == "server: no answer within 0.3 s (1 tries)"


def test_no_more_requests_are_in_flight_than_allowed(server: FaultyReplies):
    asked(server, samples=20, concurrency=3)
    assert 1 <= server.seen.most_in_flight <= 3


def test_the_key_comes_from_the_environment_only(
    server: FaultyReplies, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "k-123")
    asked(server)
    assert [headers.get("Authorization") for headers in server.seen.headers] == ["Bearer k-123"]


def test_a_wrong_model_or_address_is_reported_before_the_first_request(server: FaultyReplies):
    with pytest.raises(ConfigError, match="has no model 'gpt'; it has echo"):
        ServerSampler(server.url, "gpt", plan(), lambda p: [])
    with pytest.raises(ConfigError, match="cannot be reached"):
        ServerSampler("http://127.0.0.1:9/v1", MODEL, plan(), lambda p: [])


def problems_file(path: Path) -> str:
    rows = [{"prompt": f"What is {n} + {4 - n}?", "answer": "4"} for n in range(3)] + [
        {"prompt": "5?", "answer": "5"}
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    return str(path)


def evaluated(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["eval", *arguments])
    return stopped.value.code or 0


def test_dapo_eval_judges_a_served_model(
    server: FaultyReplies,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    data = problems_file(tmp_path / "p.jsonl")
    output = tmp_path / "out.json"
    command = [
        MODEL,
        "--data",
        data,
        "--server",
        server.url,
        "data.instruction=Say it.",
        "data.system=Be brief.",
    ]
    assert evaluated(*command, "--output", str(output)) == 0
    printed = capsys.readouterr().out
    assert "holds each problem 2 times: 2 samples for each of 4 problems" in printed
    assert "75.0% (30.1% to 95.4%)" in printed
    result = json.loads(output.read_text())
    assert (result["accuracy"], result["cons@2"], result["response_tokens_mean"]) == (0.75, 0.75, 7)
    assert [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 0 + 4?\nSay it."},
    ] in [body["messages"] for body in server.bodies]
    assert not list(tmp_path.glob("*.partial"))


def test_an_evaluation_with_over_one_percent_of_errors_says_so(
    server: FaultyReplies, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server.faults = [400]
    data = problems_file(tmp_path / "p.jsonl")
    assert evaluated(MODEL, "--data", data, "--server", server.url, "--concurrency", "1") == 0
    printed = " ".join(capsys.readouterr().out.split())
    title, _, rest = printed.partition("avg@2")
    assert "WARNING: 1 of 8 responses have no verdict (12.5%): metrics of the others only" in title
    assert "1 of 8 responses have no verdict: server: status 400: come again" in rest


def test_an_evaluation_without_a_verdict_fails_and_says_no_accuracy(
    server: FaultyReplies, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server.faults = [400] * 8
    data = problems_file(tmp_path / "p.jsonl")
    assert evaluated(MODEL, "--data", data, "--server", server.url) == 1
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if "avg@2" in line]
    assert "nothing judged" in row


def test_two_results_are_compared_problem_by_problem(
    server: FaultyReplies, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = problems_file(tmp_path / "p.jsonl")
    first = tmp_path / "first.json"
    both = tmp_path / "both.json"
    server.text = "Answer: 5"
    assert evaluated(MODEL, "--data", data, "--server", server.url, "--output", str(first)) == 0
    server.text = "Answer: 4"
    compare = ["--compare", str(first), MODEL, "--data", data, "--server", server.url]
    assert evaluated(*compare, "--output", str(both)) == 0
    printed = capsys.readouterr().out
    verdict = "no significant difference: the second - the first +50.0 points (95 % interval"
    assert verdict in " ".join(printed.split())
    assert "the second: better on 3 problems, worse on 1, equal on 0" in printed
    assert json.loads(both.read_text())["comparison"]["difference"] == 0.5
    assert evaluated(*compare, "train.seed=1") == 0
    assert "their seeds are 0 and 1: other random numbers" in capsys.readouterr().out
    assert evaluated(*compare, "eval.top_p=1") == 2
    assert "cannot be compared: top_p is 0.7 in one and 1.0 in the other" in capsys.readouterr().err


@contextmanager
def server_process(seconds: float) -> Iterator[str]:
    """A server in a process of its own."""
    command = [sys.executable, str(TESTS / "helpers" / "fake_chat_server.py"), str(seconds)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def test_an_evaluation_that_is_killed_or_interrupted_continues(
    fork_server: ForkServer, tmp_path: Path
):
    """kill -9 after a problem, Ctrl-C after another; the third attempt asks for the rest only."""
    data = problems_file(tmp_path / "p.jsonl")
    output = tmp_path / "out.json"
    journal = tmp_path / "out.json.partial"
    log = tmp_path / "log"
    with server_process(0.2) as url:
        # four problems twice, one request after the other
        command = ["eval", MODEL, "--data", data, "--server", url, "--output", str(output)]
        command += ["--concurrency", "1", "reward.workers=1"]
        for lines, signum, status in ((2, signal.SIGKILL, -9), (3, signal.SIGINT, 130)):
            started = time.monotonic()
            code, _ = fork_server.run(
                *command, output=log, file=str(journal), lines=lines, signals=[(0, signum)]
            )
            assert code == status
            assert time.monotonic() - started < 90  # not the ten minutes that a request may take
            assert not output.exists()
        assert "stopped by SIGINT; the same command continues" in log.read_text()
        done = journal.read_bytes().count(b"\n") - 1
        code, _ = fork_server.run(*command, output=log)
    assert f"continuing: {done} of 4 problems" in log.read_text()
    assert code == 0
    assert json.loads(output.read_text())["accuracy"] == 0.75
    assert not journal.exists()


def test_a_line_a_problem_is_printed_on_demand(
    server: FaultyReplies, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = problems_file(tmp_path / "p.jsonl")
    assert evaluated(MODEL, "--data", data, "--server", server.url, "--by-problem") == 0
    lines = capsys.readouterr().out.split("by problem")[1].splitlines()
    assert any("0 + 4?" in line and "2/2" in line and "1.000" in line for line in lines)
    assert any("5?" in line and "0/2" in line and "0.000" in line for line in lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds a list, not an evaluation"),
        (
            '{"table": []}',
            "was not written by `dapo eval --output` or a run: it lacks accuracy, binary",
        ),
    ],
)
def test_a_file_that_is_no_result_is_an_error_that_says_so(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "r.json"
    path.write_text(content)
    assert evaluated("--compare", str(path), str(path), "--data", "builtin:sums") == 2
    assert message in " ".join(capsys.readouterr().err.split())
