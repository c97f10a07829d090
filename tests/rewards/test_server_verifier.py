"""`server`, against a real one on this machine: the protocol, further tries, and what is an
error.
"""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dapo.core.errors import RewardError
from dapo.rewards import build_verifier, get_verifier
from dapo.types import Problem
from helpers.verifier_pools import open_pool

PROBLEM = Problem("1", "What is 6 * 7?", "42", "here", {"level": 3})


class Judge(BaseHTTPRequestHandler):
    """Says right to the answer itself; `server.script` holds what it does first, one entry a
    request.
    """

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((body, dict(self.headers), time.monotonic()))
        step = self.server.script.pop(0) if self.server.script else None
        if callable(step):
            return step(self)
        if isinstance(step, int):
            return self.reply(step, b"busy")
        verdicts = [item["response"] == item["answer"] for item in body["items"]]
        return self.reply(
            200, json.dumps({"verdicts": verdicts} if step is None else step).encode()
        )

    def reply(self, status, body, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        server.daemon_threads = True
        server.block_on_close = False
        server.seen = []
        server.script = []
        server.url = f"http://127.0.0.1:{server.server_port}/judge"
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield server
        server.shutdown()


def verdicts(server, responses, **options):
    verifier = get_verifier("server", url=server.url, **options)
    return verifier.judge_group(PROBLEM, responses, [()] * len(responses))


def test_a_group_is_one_request_with_all_of_the_problem(server):
    assert [v.correct for v in verdicts(server, ["42", "41", "\ud83d"])] == [True, False, False]
    ((body, headers, _),) = server.seen
    assert body["version"] == 1
    assert body["items"][1] == {
        "id": "1", "prompt": "What is 6 * 7?", "answer": "42", "source": "here", "fields": {"level": 3},
        "response": "41",
    }  # fmt: skip
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers


def test_a_large_group_is_cut_into_batches(server):
    assert [v.correct for v in verdicts(server, ["42", "41"] * 5, batch_size=4)] == [
        True,
        False,
    ] * 5
    assert [len(body["items"]) for body, _, _ in server.seen] == [4, 4, 2]


def test_a_verdict_is_a_bool_a_grade_null_an_object_or_an_error(server):
    server.script = [
        {"verdicts": [True, 0.25, None, {"correct": False}, {"score": 2}, {"correct": True, "score": 0.5},
                      {"error": "no judge"}, "yes", {"score": "x"}, {}, {"score": 1e999},
                      {"score": 1, "error": False}, {"score": 1, "error": ""}]}
    ]  # fmt: skip
    found = verdicts(server, [""] * 13)
    assert [v and (v.correct, v.score) for v in found[:6]] == [
        (True, 1.0), (None, 0.25), None, (False, -1.0), (None, 2.0), (True, 0.5),
    ]  # fmt: skip
    assert found[6].error == "server: no judge"
    assert [v.error is not None for v in found[7:11]] == [True] * 4
    assert [v.error for v in found[11:]] == [None, None]  # no error is said in several ways


def test_the_token_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "abc")
    verdicts(server, ["42"], token_env="JUDGE_KEY")
    assert server.seen[0][1]["Authorization"] == "Bearer abc"


def test_a_busy_server_is_asked_again_with_growing_pauses(server):
    server.script = [503, lambda request: request.reply(429, b"", Retry_After="1"), None]
    assert verdicts(server, ["42"])[0].correct is True
    first, second, third = (at for _, _, at in server.seen)
    assert second - first >= 0.2
    assert third - second >= 1.0


def test_a_server_that_stays_busy_is_an_error_that_names_it_after_all_tries(server):
    server.script = [500] * 9
    (verdict,) = verdicts(server, ["42"], retries=1)
    assert (
        verdict.error == f"server: {server.url}: status 500 Internal Server Error: 'busy' (2 tries)"
    )
    assert (verdict.correct, len(server.seen)) == (None, 2)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (404, "status 404 Not Found: 'busy'"),
        (
            {"verdicts": [True, True]},
            'must answer {"verdicts": [...]} with 1 of them, got \'{"verdicts": [true, true]}',
        ),
        ({"scores": [1]}, 'must answer {"verdicts": [...]} with 1 of them'),
        ([True], 'must answer {"verdicts": [...]} with 1 of them'),
        (lambda request: request.reply(200, b"<html>"), "did not answer with JSON: '<html>'"),
        (lambda request: request.reply(200, b"[" * 100_000), "did not answer with JSON"),
        (
            lambda request: request.reply(302, b"", Location="http://127.0.0.1:9/"),
            "status 302 Found",
        ),
        (
            lambda request: request.reply(200, b"x" * ((1 << 24) + 1)),
            "an answer of more than 16777216 bytes",
        ),
    ],
)
def test_an_answer_that_is_not_as_agreed_is_an_error_at_once(server, step, message):
    server.script = [step]
    (verdict,) = verdicts(server, ["42"])
    assert message in verdict.error
    assert len(server.seen) == 1


def drip(request):
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    for _ in range(1000):
        try:
            request.wfile.write(b" ")
        except OSError:
            return
        time.sleep(0.05)


@pytest.mark.parametrize("slow", [lambda request: time.sleep(50), drip])
def test_no_answer_in_time_is_tried_again_and_then_an_error(server, slow):
    server.script = [slow, slow]
    began = time.monotonic()
    (verdict,) = verdicts(server, ["42"], request_s=0.2, retries=1)
    assert "no answer within 0.2 s (2 tries)" in verdict.error
    assert time.monotonic() - began < 40  # a whole answer would take fifty seconds


def test_the_time_of_a_group_ends_the_tries(server):
    server.script = [503] * 99
    began = time.monotonic()
    (verdict,) = verdicts(server, ["42"], total_s=0.5, retries=50)
    assert "status 503" in verdict.error
    assert time.monotonic() - began < 60  # the waits between fifty tries add up to minutes


def test_no_server_is_an_error_and_one_bad_batch_leaves_the_others_alone(server):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    verdict = get_verifier("server", url=f"http://127.0.0.1:{port}/", retries=0)(PROBLEM, "42")
    assert verdict.error.endswith("Connection refused (1 tries)")
    server.script = [404]
    first, second = verdicts(server, ["42", "42"], batch_size=1)
    assert (first.error is None, second.correct) == (False, True)


def test_it_works_from_the_pool_and_with_other_verifiers(server):
    options = {"server": {"url": server.url}}
    with open_pool({"server": 1.0, "exact": 0.5}, options=options, workers=1) as pool:
        right, wrong = pool.submit(PROBLEM, ["42", "41"], [(), ()]).result(30)
    assert (right.score, wrong.score) == (1.5, -1.5)
    assert (
        build_verifier("server", options={"url": server.url})
        .judge_group(PROBLEM, ["42"], [()])[0]
        .correct
        is True
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "verifier server needs the option url: reward.options.url=..."),
        (
            {"url": "ftp://x"},
            "server: url must be http://HOST[:PORT]/PATH or https://..., got 'ftp://x'",
        ),
        (
            {"url": "http://x", "batch_size": 0},
            "server: batch_size must be a positive integer, got 0",
        ),
        (
            {"url": "http://x", "retries": -1},
            "server: retries must be a non-negative integer, got -1",
        ),
        ({"url": "http://x", "total_s": 0}, "server: total_s must be a positive number, got 0"),
        (
            {"url": "http://x", "token_env": "NO_SUCH_VARIABLE"},
            "the environment variable NO_SUCH_VARIABLE (token_env)",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(RewardError) as caught:
        get_verifier("server", **options)
    assert message in str(caught.value)
