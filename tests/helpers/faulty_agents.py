"""Agents for tests that run in their own processes: good ones, and many that misbehave."""

import concurrent.futures
import http.client
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from dapo.environments.games.calculator import Calculator
from dapo.types import Problem
from helpers.environments import Digits

Message = Mapping[str, Any]


def post(url: str, key: str, body: Any, **headers: str) -> Any:
    """Post JSON, or bytes as they are, and return the answer's JSON. Raises HTTPError."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(
        url,
        data,
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


def complete(base_url: str, api_key: str, messages: list[Message], **options: Any) -> Any:
    body = {"model": "policy", "messages": messages, **options}
    return post(f"{base_url}/chat/completions", api_key, body)


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


# --- agents that play environments


def _relay(game: Any, problem: Problem, base_url: str, api_key: str) -> dict[str, Any]:
    """Play an environment of the tests as an agent does: its turns are calls."""
    game.reset(problem, 0)
    messages: list[Message] = [{"role": "user", "content": problem.prompt}]
    total = 0.0
    for _ in range(8):
        choice = complete(base_url, api_key, messages)["choices"][0]
        if choice["finish_reason"] == "length":
            break
        text = choice["message"]["content"]
        result = game.step(text)
        total += result.reward or 0
        if result.done:
            return {"score": total, "correct": result.correct}
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": result.observation},
        ]
    result = game.end()
    return {"score": total + result.reward, "correct": result.correct}


def relay_calculator(problem: Problem, *, base_url: str, api_key: str) -> dict[str, Any]:
    return _relay(Calculator(), problem, base_url, api_key)


def relay_digits(problem: Problem, *, base_url: str, api_key: str) -> dict[str, Any]:
    return _relay(Digits(), problem, base_url, api_key)


def wild(problem: Problem, *, base_url: str, api_key: str) -> float:
    """Extend, rewrite, repeat, fork and ask side by side, by the problem alone."""
    rng = random.Random(f"{problem.id} wild")
    words = ["a", "b", "c", "d", "e", "f", "g", "1", "2", "3", "4"]
    histories: list[list[Message]] = [[{"role": "user", "content": problem.prompt}]]
    last: list[Message] | None = None
    score = 0.0
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(("extend", "rewrite", "repeat", "fork", "parallel", "n"))
        history = rng.choice(histories)
        if kind == "repeat" and last is not None:
            complete(base_url, api_key, last, max_tokens=4)
            continue
        if kind == "rewrite":
            history = [{"role": "user", "content": " ".join(rng.choices(words, k=5))}]
        if history[-1]["role"] == "assistant":
            history = [*history, {"role": "user", "content": rng.choice(words)}]
        if kind == "parallel":
            rows = [[*history[:-1], {"role": "user", "content": w}] for w in rng.sample(words, 3)]
            with concurrent.futures.ThreadPoolExecutor(3) as threads:
                begun = {
                    threads.submit(complete, base_url, api_key, row, max_tokens=4): row
                    for row in rows
                }
                for number, done in enumerate(concurrent.futures.as_completed(begun)):
                    text = text_of(done.result())
                    score += number * len(text)  # by the order in which the answers came
                    histories.append([*begun[done], {"role": "assistant", "content": text}])
            continue
        answer = complete(base_url, api_key, history, max_tokens=4, n=2 if kind == "n" else 1)
        last = history
        for choice in answer["choices"]:
            text = choice["message"]["content"]
            histories.append([*history, {"role": "assistant", "content": text}])
            score += len(text) % 3
    return score / 10


def one_call(problem: Problem, *, base_url: str, api_key: str) -> float:
    return float(len(text_of(complete(base_url, api_key, [{"role": "user", "content": "Say."}]))))


def lengths(problem: Problem, *, base_url: str, api_key: str) -> dict[str, Any]:
    """Ask once, and score the length of the answer; right if it is even."""
    text = text_of(complete(base_url, api_key, [{"role": "user", "content": problem.prompt}]))
    return {"score": len(text) / 10, "correct": len(text) % 2 == 0}


def ids_of_answers(problem: Problem, *, base_url: str, api_key: str) -> dict[str, float]:
    """Reward the second of three calls by its id."""
    names = [
        complete(base_url, api_key, [{"role": "user", "content": word}], max_tokens=4)["id"]
        for word in ("one", "two", "three")
    ]
    return {names[1]: 0.5}


def types_of_fields(problem: Problem, *, base_url: str, api_key: str) -> dict[str, Any]:
    """Say the types of the problem's columns as a component of the reward."""
    text = ", ".join(f"{name} {type(value).__name__}" for name, value in problem.fields.items())
    complete(base_url, api_key, [{"role": "user", "content": text}], max_tokens=2)
    return {"score": 1.0, "correct": True}


def types_of_row(data: dict[str, Any], *, base_url: str, api_key: str) -> dict[str, Any]:
    """Likewise, in the form that other systems use."""
    text = ", ".join(f"{name} {type(value).__name__}" for name, value in data.items())
    complete(base_url, api_key, [{"role": "user", "content": text}], max_tokens=2)
    return {"score": 1.0}


# --- agents that misbehave


def raises(problem: Problem, *, base_url: str, api_key: str) -> float:
    raise ConnectionError("the game server is down")


def answers_must_be_numbers(problem: Problem, *, base_url: str, api_key: str) -> float:
    return float(text_of(complete(base_url, api_key, [{"role": "user", "content": "Say."}])))


def says_the_time(problem: Problem, *, base_url: str, api_key: str) -> float:
    complete(base_url, api_key, [{"role": "user", "content": f"It is {time.time_ns()}."}])
    return 0.0


def asks_in_order(problem: Problem, *, base_url: str, api_key: str) -> dict[str, float]:
    """Send the requests of `problem.fields`, and count their different answers.

    Each is the number of turns behind the first one, its headers and its further fields.
    """
    history: list[Message] = [{"role": "user", "content": "Say."}]
    names = []
    text = ""
    for turns, headers, fields in problem.fields["requests"]:
        while len(history) < 2 * turns + 1:
            history.append({"role": "assistant", "content": text})
            history.append({"role": "user", "content": "Go on."})
        body = {"model": "policy", "messages": history[: 2 * turns + 1], **fields}
        answer = post(f"{base_url}/chat/completions", api_key, body, **headers)
        text = text_of(answer)
        names.append(answer["id"])
    return {"score": 1.0, "answers": len(set(names))}


def imports_late(problem: Problem, *, base_url: str, api_key: str) -> dict[str, float]:
    """Say whether the module of `problem.fields` was there, and import it; `keeps`: it has the key."""
    name = problem.fields["module"]
    was_there = name in sys.modules
    module = importlib.import_module(name)
    if problem.fields["keeps"]:
        module.api_key = api_key  # type: ignore[attr-defined]
    return {"score": 1.0, "was_there": float(was_there)}


def leaves_a_lazy_module(problem: Problem, *, base_url: str, api_key: str) -> float:
    """Leave a module that raises where it is read, as lazy ones of absent libraries do."""

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(f"there is no library with {name}")

    sys.modules["lazy_module"] = Lazy("lazy_module")
    complete(base_url, api_key, [{"role": "user", "content": "Say."}])
    return 1.0


def is_random(problem: Problem, *, base_url: str, api_key: str) -> float:
    """Draw from the random numbers that an episode seeds."""
    complete(base_url, api_key, [{"role": "user", "content": f"Roll {random.random()}."}])
    return random.random()


def asks_warmer(problem: Problem, *, base_url: str, api_key: str) -> float:
    complete(base_url, api_key, [{"role": "user", "content": "Say."}], temperature=0.7)
    return 0.0


def exits(problem: Problem, *, base_url: str, api_key: str) -> float:
    os._exit(0)


def says_exit(problem: Problem, *, base_url: str, api_key: str) -> float:
    sys.exit(0)


def kills_itself(problem: Problem, *, base_url: str, api_key: str) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def hangs(problem: Problem, *, base_url: str, api_key: str) -> float:
    time.sleep(600)
    return 1.0


def hangs_behind_a_call(problem: Problem, *, base_url: str, api_key: str) -> float:
    one_call(problem, base_url=base_url, api_key=api_key)
    time.sleep(600)
    return 1.0


def spins(problem: Problem, *, base_url: str, api_key: str) -> float:
    while True:
        pass


def stops_itself(problem: Problem, *, base_url: str, api_key: str) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def floods_output(problem: Problem, *, base_url: str, api_key: str) -> float:
    for _ in range(2000):
        print("x" * 10_000)
    raise ValueError("flooded")


def takes_memory(problem: Problem, *, base_url: str, api_key: str) -> float:
    return float(len(bytearray(2**31)))


def children_take_memory(problem: Problem, *, base_url: str, api_key: str) -> float:
    code = "import time; x = b'x' * (40 * 2**20); time.sleep(60)"
    children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    return float(sum(child.wait() for child in children))


def forks_without_end(problem: Problem, *, base_url: str, api_key: str) -> float:
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)


def leaves_children(problem: Problem, *, base_url: str, api_key: str) -> float:
    """Leave a daemon in a session of its own, which holds a connection, and end well."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    return one_call(problem, base_url=base_url, api_key=api_key)


def plays_beside_a_busy_process(problem: Problem, *, base_url: str, api_key: str) -> float:
    subprocess.Popen([sys.executable, "-c", "while True: pass"])
    complete(base_url, api_key, [{"role": "user", "content": problem.prompt}])
    return 1.0


def returns_nothing(problem: Problem, *, base_url: str, api_key: str) -> None:
    one_call(problem, base_url=base_url, api_key=api_key)


def returns_text(problem: Problem, *, base_url: str, api_key: str) -> str:
    return "0.5"


def returns_nan(problem: Problem, *, base_url: str, api_key: str) -> float:
    return float("nan")


def returns_huge(problem: Problem, *, base_url: str, api_key: str) -> int:
    return 10**400


def returns_list(problem: Problem, *, base_url: str, api_key: str) -> list[float]:
    return [1.0]


def returns_object(problem: Problem, *, base_url: str, api_key: str) -> object:
    return object()


def returns_deep(problem: Problem, *, base_url: str, api_key: str) -> Any:
    value: Any = 1.0
    for _ in range(100_000):
        value = {"score": value}
    return value


def returns_nested(problem: Problem, *, base_url: str, api_key: str) -> Any:
    return {"score": {"score": 1.0}}


def returns_megabytes(problem: Problem, *, base_url: str, api_key: str) -> Any:
    return {"score": 1.0, "x" * 2**23: 1.0}


def returns_other_ids(problem: Problem, *, base_url: str, api_key: str) -> Any:
    return {"another-0": 1.0}


def returns_correct_as_text(problem: Problem, *, base_url: str, api_key: str) -> Any:
    return {"score": 1.0, "correct": "yes"}


def writes_to_every_descriptor(problem: Problem, *, base_url: str, api_key: str) -> float:
    """Write on every socket that the process has, also the one on which its end is reported."""
    for number in range(3, 64):
        try:
            os.write(number, b"\xff\x00 no json\n" * 100)
        except OSError:
            continue
    time.sleep(600)
    return 1.0


def forges_its_result(problem: Problem, *, base_url: str, api_key: str) -> float:
    for number in range(3, 64):
        try:
            os.write(number, b'["a list of one"]\n{"other": 1}\n')
        except OSError:
            continue
    time.sleep(600)
    return 1.0


def closes_every_descriptor(problem: Problem, *, base_url: str, api_key: str) -> float:
    os.closerange(3, 1024)
    return 1.0


def keeps_connections(problem: Problem, *, base_url: str, api_key: str) -> float:
    """Open many connections, send half of a request on each, and never close them."""
    address = urlsplit(base_url)
    connections = [socket.create_connection((address.hostname, address.port)) for _ in range(300)]
    for connection in connections:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Len")
    raise ValueError(f"{len(connections)} connections are open")


def leaves_while_it_is_answered(problem: Problem, *, base_url: str, api_key: str) -> float:
    """Ask, close the connection, and end without a reward."""
    address = urlsplit(base_url)
    body = json.dumps({"messages": [{"role": "user", "content": "Say."}]})
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    connection.request("POST", f"{address.path}/chat/completions", body)
    connection.close()
    return None  # type: ignore[return-value]


def repeats_without_end(problem: Problem, *, base_url: str, api_key: str) -> float:
    while True:
        one_call(problem, base_url=base_url, api_key=api_key)


def asks_without_end(problem: Problem, *, base_url: str, api_key: str) -> float:
    number = 0
    while True:
        number += 1
        complete(base_url, api_key, [{"role": "user", "content": str(number)}])


MISBEHAVING: Mapping[str, str] = {
    "raises": "raised ConnectionError: the game server is down",
    "exits": "the agent's process exited with code 0",
    "says_exit": "raised SystemExit: 0",
    "kills_itself": "the agent's process was killed by SIGKILL",
    "hangs": "the agent did nothing for 4 s",
    "hangs_behind_a_call": "the agent did nothing for 4 s",
    "spins": "the agent did nothing for 4 s",
    "plays_beside_a_busy_process": "the agent has asked, and a process of it has gone on for 4 s",
    "stops_itself": "the agent's process was stopped by a signal",
    "floods_output": "raised ValueError: flooded",
    "takes_memory": "raised MemoryError",
    "children_take_memory": "the agent's process and its descendants used more than 0.125 GiB",
    "forks_without_end": "the agent's process ",  # too many of them, or too much memory
    "returns_nothing": "the agent ended without a reward",
    "returns_text": "the reward is '0.5', expected a number",
    "returns_nan": "the reward is nan, expected a finite number",
    "returns_huge": "the reward is inf, expected a finite number",
    "returns_list": "the reward is list, expected a number",
    "returns_object": "the agent returned object, expected a number",
    "returns_deep": "the agent returned dict, expected a number",
    "returns_nested": "score is dict, expected a number",
    "returns_megabytes": "the agent wrote something else than its result",
    "returns_other_ids": "the agent returned a mapping without a score",
    "returns_correct_as_text": "correct is 'yes', expected True, False or None",
    "writes_to_every_descriptor": "the agent wrote something else than its result",
    "forges_its_result": "the agent wrote something else than its result",
    "closes_every_descriptor": "the agent's process",
    "keeps_connections": "raised ValueError: 300 connections are open",
    "leaves_while_it_is_answered": "the agent ended without a reward",
    "repeats_without_end": "the agent sent the same request 100 times again",
    "asks_without_end": "the agent asked 100 times for answers, and nothing is left",
}
"""Agents that end in an error, with the beginning of its reason."""


def play(problem: Problem, *, base_url: str, api_key: str) -> Any:
    """Be the agent that the problem names."""
    agent: Callable[..., Any] = globals()[problem.fields["agent"]]
    return agent(problem, base_url=base_url, api_key=api_key)
