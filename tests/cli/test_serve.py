"""`dapo serve`: its APIs, many clients at once, who is refused, and how it ends."""

import http.client
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dapo.core.errors import EngineError
from dapo.core.listening import open_listener
from dapo.core.text import one_line
from dapo.start.generate import OpenModel
from dapo.start.model_choice import ModelChoice, choose_model
from dapo.start.model_server import LOOPBACK, ModelServer
from dapo.start.served_model import ServedModel, shown_text
from helpers.commands import run
from helpers.processes import wait_until
from helpers.tables import for_each_row

MODEL = "tiny-random"
LIMIT = 12
QUESTION = [{"role": "user", "content": "1 + 2 ="}]
CHAT = {"messages": QUESTION, "temperature": 0}
ENDLESS = {**CHAT, "max_tokens": 4000, "stream": True}


@dataclass
class Served:
    """A server, and how its clients ask."""

    url: str
    model: ServedModel
    opened: OpenModel
    failure: BaseException | None = None

    def connect(self) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        assert address.hostname is not None
        return http.client.HTTPConnection(address.hostname, address.port, timeout=60)

    def send(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.connect()
        method = "GET" if body is None else "POST"
        content = body if isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, content, headers or {})
        return connection, connection.getresponse()

    def ask(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        connection, response = self.send(path, body, headers)
        with closing(connection):
            return response.status, json.loads(response.read())

    def events(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        connection, response = self.send(path, {**body, "stream": True})
        with closing(connection):
            lines = response.read().decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(text) for text in data if text != "[DONE]"]


@contextmanager
def serving(
    opened: OpenModel, *, key: str | None = None, as_trained: bool = False, max_open: int = 64
) -> Iterator[Served]:
    """Serve a model in threads of this process."""
    model = ServedModel(opened, limit=LIMIT, as_trained=as_trained, max_open=max_open)
    ended = threading.Event()
    with open_listener(LOOPBACK, 0) as listener, closing(ModelServer(model, listener, key=key)):
        server = Served(f"http://{LOOPBACK}:{listener.getsockname()[1]}", model, opened)

        def answer() -> None:
            try:
                model.run(ended.is_set)
            except EngineError as error:
                server.failure = error

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield server
        finally:
            ended.set()
            thread.join()


@pytest.fixture(scope="module")
def opened() -> Iterator[OpenModel]:
    with closing(OpenModel(choose_model(MODEL))) as model:
        yield model


@pytest.fixture
def server(opened: OpenModel) -> Iterator[Served]:
    with serving(opened) as served:
        yield served


def content_of(path: str, answer: Mapping[str, Any]) -> str:
    if path == "chat/completions":
        return str(answer["choices"][0]["message"]["content"])
    if path == "completions":
        return str(answer["choices"][0]["text"])
    if path == "responses":
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["content"][0]["text"])


def pieces_of(path: str, events: list[dict[str, Any]]) -> list[str]:
    """The texts that the events of a stream add."""
    if path == "chat/completions":
        pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    elif path == "completions":
        pieces = [event["choices"][0]["text"] for event in events]
    elif path == "responses":
        pieces = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    else:
        pieces = [event["delta"]["text"] for event in events if "text" in event.get("delta", {})]
    return [piece for piece in pieces if piece]


@for_each_row(
    ("path", "prompt"),
    [
        ("chat/completions", {"messages": QUESTION, "max_tokens": 40}),
        ("completions", {"prompt": "1 + 2 =", "max_tokens": 40}),
        ("responses", {"input": "1 + 2 =", "max_output_tokens": 40}),
        ("messages", {"messages": QUESTION, "max_tokens": 40}),
    ],
)
def test_each_api_streams_the_text_of_its_whole_answer_as_it_is_sampled(
    server: Served, path: str, prompt: dict[str, Any]
):
    body = {**prompt, "temperature": 0, "model": MODEL}
    status, answer = server.ask(f"/v1/{path}", body)
    assert status == 200
    text = content_of(path, answer)
    _, chat = server.ask("/v1/chat/completions", {**CHAT, "max_tokens": 40})
    assert text == chat["choices"][0]["message"]["content"]
    pieces = pieces_of(path, server.events(f"/v1/{path}", body))
    assert "".join(pieces) == text
    assert len(pieces) > 4  # of 40 tokens; the server may join what it has not sent yet


def test_answers_are_those_of_generate_for_any_number_of_clients_at_once(
    capsys: pytest.CaptureFixture[str], server: Served
):
    prompts = [f"{number} + 2 =" for number in range(16)]
    words = ("--temperature", "0", "--max-new-tokens", str(LIMIT), "--json")
    _, out, _ = run(capsys, "generate", MODEL, *prompts, *words)
    expected = [json.loads(line)["response"] for line in out.splitlines()]

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "temperature": 0}
        return content_of("completions", server.ask("/v1/completions", body)[1])

    with ThreadPoolExecutor(16) as clients:
        assert list(clients.map(ask, prompts)) == expected


def test_a_seed_repeats_an_answer_and_samples_of_a_request_differ(server: Served):
    def texts(**values: Any) -> list[str]:
        _, answer = server.ask("/v1/chat/completions", {"messages": QUESTION, **values})
        return [choice["message"]["content"] for choice in answer["choices"]]

    first = texts(n=3, seed=5)
    assert len(set(first)) == 3
    assert texts(n=3, seed=5) == first
    assert texts(seed=5) == first[:1]
    assert texts() != texts()
    assert texts(temperature=0, seed=1) == texts(temperature=0, seed=2)


def test_a_stop_text_ends_the_answer_and_no_event_has_it(server: Served):
    body = {**CHAT, "max_tokens": 60}
    text = content_of("chat/completions", server.ask("/v1/chat/completions", body)[1])
    stop = text[4:7]
    status, answer = server.ask("/v1/chat/completions", {**body, "stop": [stop, "never"]})
    choice = answer["choices"][0]
    assert (status, choice["finish_reason"]) == (200, "stop")
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert answer["usage"]["completion_tokens"] < 20  # of 60
    events = server.events("/v1/chat/completions", {**body, "stop": stop})
    assert "".join(pieces_of("chat/completions", events)) == text[: text.index(stop)]


@for_each_row(
    ("text", "stops", "has_tools", "shown"),
    [
        ("one two ", (), False, "one two "),
        ("one tw", ("two",), False, "one "),
        ("one two three", ("two", "three"), False, "one "),
        ("one two three", ("three", "e two"), False, "on"),
        ("I ask. <tool_c", (), True, "I ask."),
        ('{"name": "add"', (), True, ""),
        ("\nI ask", (), True, ""),
        ("I ask <b", (), False, "I ask <b"),
    ],
)
def test_a_stream_shows_what_no_later_token_can_take_back(
    text: str, stops: tuple[str, ...], has_tools: bool, shown: str
):
    assert shown_text(text, stops, has_tools=has_tools) == shown


def test_a_client_that_leaves_frees_its_place(opened: OpenModel):
    with serving(opened, max_open=2) as server:
        clients = [server.send("/v1/chat/completions", ENDLESS) for _ in range(2)]
        for _, response in clients:
            response.readline()
        status, answer = server.ask("/v1/chat/completions", CHAT)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        connection, response = server.send("/v1/chat/completions", CHAT)
        with closing(connection):
            assert response.getheader("Retry-After") == "1"
        for connection, response in clients:
            response.close()
            connection.close()
        wait_until(lambda: server.model.num_open == 0, timeout_s=20, what="both have left")
        assert server.ask("/v1/chat/completions", CHAT)[0] == 200


@for_each_row(
    ("path", "body", "status", "message"),
    [
        ("chat/completions", {"messages": []}, 400, "messages is empty"),
        ("chat/completions", b"{", 400, "the body is not JSON"),
        ("chat/completions", {**CHAT, "temperature": -1}, 400, "temperature is -1.0, expected 0"),
        ("chat/completions", {**CHAT, "temperature": 1e-40}, 400, "a number from 1e-20 to 1e+20"),
        ("chat/completions", {**CHAT, "temperature": 1e300}, 400, "a number from 1e-20 to 1e+20"),
        ("chat/completions", {**CHAT, "top_p": 0}, 400, "top_p is 0.0, expected a number above 0"),
        ("chat/completions", {**CHAT, "logit_bias": {"5": 1}}, 400, "logit_bias: this server"),
        (
            "chat/completions",
            {**CHAT, "response_format": {"type": "json_object"}, "presence_penalty": 1},
            400,
            "presence_penalty and response_format: this server cannot do that; leave it out",
        ),
        (
            "chat/completions",
            {**CHAT, "chat_template_kwargs": {"chat_template": "x"}},
            400,
            "messages are formatted by the model's own",
        ),
        ("chat/completions", {**CHAT, "model": "gpt-9"}, 404, "there is no model 'gpt-9' here"),
        ("completions", {"prompt": ""}, 400, "expected a text"),
        ("completions", {"prompt": "1 + 2 = " * 900}, 400, "the model's context is 4,096 tokens"),
        ("embeddings", {"input": "a"}, 404, "there are POST /v1/chat/completions"),
    ],
)
def test_what_cannot_be_answered_is_a_sentence(
    server: Served, path: str, body: Any, status: int, message: str
):
    for stream in (False, True):
        asked = body if isinstance(body, bytes) else {**body, "stream": stream}
        got, answer = server.ask(f"/v1/{path}", asked)
        assert (got, message in answer["error"]["message"]) == (status, True), answer
    if "context" in message:
        assert answer["error"]["code"] == "context_length_exceeded"


def test_only_clients_of_this_machine_or_with_the_key_may_ask(opened: OpenModel):
    for header in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        with serving(opened) as server:
            assert server.ask("/v1/models", None, header)[0] == 403
            assert server.ask("/v1/models", None, {"Host": "localhost:9"})[0] == 200
            assert server.ask("/health", None)[1]["model"] == MODEL
    with serving(opened, key="secret") as server:
        for key, status in (("secret", 200), ("Secret", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}", "Host": "reached.example"}
            assert server.ask("/v1/chat/completions", CHAT, headers)[0] == status
            assert server.ask("/v1/models", None, {"x-api-key": key})[0] == status


def test_as_trained_adds_the_instruction_and_the_plain_server_does_not(opened: OpenModel):
    config = opened.choice.config
    data = config.data.model_copy(update={"instruction": "Only digits."})
    choice = ModelChoice(MODEL, config.model_copy(update={"data": data}))
    prompts = []
    with closing(OpenModel(choice)) as trained:
        for as_trained in (False, True):
            with serving(trained, as_trained=as_trained) as server:
                ids = server.ask("/v1/chat/completions", CHAT)[1]["prompt_token_ids"]
                prompts.append(trained.encoder.decode_prompt(ids))
    assert prompts == ["1 + 2 =", "1 + 2 =\nOnly digits."]


def test_eval_and_chat_at_the_server_equal_those_of_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sync_run: Path
):
    words = ("eval", str(sync_run), "eval.temperature=0", "--json", "--by-problem")
    chat = ("chat", str(sync_run), "--temperature", "0", "--max-new-tokens", "6")
    with closing(OpenModel(choose_model(sync_run))) as model, serving(model) as server:
        at_server = ("--server", f"{server.url}/v1")
        results = []
        for place in ((), at_server):
            code, out, err = run(capsys, *words, *place)
            assert code == 0, err
            results.append(json.loads(out))
        texts = []
        for place in ((), at_server):
            monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 2 =\n"))
            code, out, err = run(capsys, *chat, *place)
            assert code == 0, err
            texts.append(out)
    assert results[0]["table"] == results[1]["table"]
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert texts[0] == texts[1]


def test_a_model_that_fails_ends_the_server_and_answers_whoever_waits():
    with closing(OpenModel(choose_model(MODEL))) as model, serving(model) as server:
        connection, response = server.send("/v1/chat/completions", ENDLESS)
        response.readline()
        model.engine.close()
        with closing(connection):
            rest = response.read().decode()
        assert '"error"' in rest
        assert server.ask("/v1/chat/completions", CHAT)[0] == 503
        wait_until(lambda: server.failure is not None)


def test_ctrl_c_finishes_the_answers_that_run_and_sigterm_is_143(
    capsys: pytest.CaptureFixture[str],
):
    for signum, code in ((signal.SIGINT, 0), (signal.SIGTERM, 143)):
        with open_listener(LOOPBACK, 0) as listener:
            port = listener.getsockname()[1]
        answers: list[Any] = []

        def ask_and_end(port: int, signum: int, answers: list[Any]) -> None:
            server = Served(f"http://{LOOPBACK}:{port}", None, None)  # type: ignore[arg-type]
            wait_until(lambda: _is_up(server))
            body = {**ENDLESS, "max_tokens": 200}
            connection, response = server.send("/v1/chat/completions", body)
            with closing(connection):
                first = response.readline()
                os.kill(os.getpid(), signum)
                answers.append(first + response.read())

        client = threading.Thread(target=ask_and_end, args=(port, signum, answers))
        client.start()
        ended, out, _ = run(capsys, "serve", MODEL, "--port", str(port))
        client.join()
        assert ended == code
        assert answers[0].decode().rstrip().endswith("[DONE]")
        assert f"http://{LOOPBACK}:{port}/v1" in out
        assert "ended after 1 answer with 200 tokens" in out
        assert all(len(line) <= 80 for line in out.splitlines())


def _is_up(server: Served) -> bool:
    try:
        return server.ask("/health", None)[0] == 200
    except OSError:
        return False


@for_each_row(
    ("words", "message"),
    [
        (("--host", "0.0.0.0"), "which needs a key: set DAPO_API_KEY, or --api-key"),
        (("--api-key", " "), "the key of --api-key or DAPO_API_KEY is empty"),
        (("--host", "no.such.host.invalid", "--api-key", "k"), "expected an address"),
        (("--step", "3"), "tiny-random is not a run directory"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
):
    code, out, err = run(capsys, "serve", MODEL, *words)
    assert (code, out) == (2, "")
    assert message in one_line(err), err


def test_a_port_that_is_taken_is_refused(capsys: pytest.CaptureFixture[str]):
    with open_listener(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
        code, _, err = run(capsys, "serve", MODEL, "--port", str(port))
    assert code == 2
    assert "a free port" in one_line(err)
