"""Integer answers: which rewritings are accepted, failures of the server, and continuing after an
interruption.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from dapo.cli.main import main
from dapo.core.errors import DataError
from dapo.core.http_client import ServerFailed, ServerRefused
from dapo.core.openai_client import ChatClient
from dapo.data.prepare.integerize import (
    MAX_CONSECUTIVE_FAILURES,
    apply,
    concurrent_map,
    decide,
    decide_without_model,
    read_integer,
    read_rewriting,
    read_solution,
)
from dapo.data.prepare.normalize import InstructionTemplate
from dapo.data.problems import load_problems
from dapo.data.sources.rows import problem_id
from dapo.types import Problem
from helpers.fake_chat_server import chat_server
from helpers.paths import ROOT
from helpers.processes import wait_until

REWRITING = (
    "I think.\n<problem>The root is (a + sqrt(b))/c in {{lowest}} terms. Find a + b +"
    " c.</problem>\n<answer>{}</answer>"
)


def problem(prompt="Find the root.", answer="\\frac{3+\\sqrt{5}}{2}"):
    return Problem(problem_id(prompt, answer), prompt, answer, "s", {"level": 3})


def scripted(*replies):
    """An `ask` that returns these in order, and the list of its requests."""
    asked = []
    remaining = iter(replies)

    def ask(request, seed):
        asked.append((request, seed))
        return next(remaining)

    return ask, asked


# --- one problem


def test_a_rewriting_that_most_solutions_confirm_is_accepted():
    ask, asked = scripted(REWRITING.format(10), "... \nAnswer: 10", "Answer: 7", "Answer: **10**")
    decision = decide(problem(), InstructionTemplate(), ask, num_solutions=3)
    assert (decision.action, decision.answer, decision.votes) == (
        "rewritten",
        "10",
        ("10", "7", "10"),
    )
    assert decision.reason == "2 of 3 solutions give 10"
    assert decision.question == "The root is (a + sqrt(b))/c in {lowest} terms. Find a + b + c."
    assert "Find the root." in asked[0][0]
    assert "\\frac{3+\\sqrt{5}}{2}" in asked[0][0]
    assert decision.question in asked[1][0]
    assert "frac" not in asked[1][0]
    assert len({seed for _, seed in asked}) == 4


def test_solving_stops_once_the_majority_is_settled():
    ask, asked = scripted(REWRITING.format(10), *["Answer: 10"] * 3)
    assert decide(problem(), InstructionTemplate(), ask, num_solutions=5).votes == ("10",) * 3
    assert len(asked) == 4


def test_after_disagreement_there_is_one_more_attempt_and_then_it_is_rejected():
    wrong = ["Answer: 7", "no idea"]
    ask, asked = scripted(REWRITING.format(10), *wrong, REWRITING.format(11), *wrong)
    decision = decide(problem(), InstructionTemplate(), ask, num_solutions=3)
    assert (decision.action, decision.attempts, decision.votes) == ("rejected", 2, ("7", None))
    assert decision.reason == "0 of 2 solutions give 11, of 3 at most"
    assert len(asked) == 6


def test_half_of_the_solutions_is_no_majority():
    ask, _ = scripted(*[REWRITING.format(10), "Answer: 10", "Answer: 9"] * 2)
    assert decide(problem(), InstructionTemplate(), ask, num_solutions=2).action == "rejected"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("I will not.", "the rewriting has no <problem> or no <answer>"),
        ("", "the rewriting has no <problem> or no <answer>"),
        (
            "<problem>New</problem><answer>1/2</answer>",
            "the rewritten problem's answer is not an integer: '1/2'",
        ),
        (
            "<problem>find the ROOT</problem><answer>1</answer>",
            "the rewriting leaves the problem as it was",
        ),
        ("<problem> </problem><answer>1</answer>", "the rewriting leaves the problem as it was"),
        (
            "<think><problem>New</problem><answer>1</answer></think>",
            "the rewriting has no <problem> or no <answer>",
        ),
    ],
)
def test_nonsense_is_rejected_with_its_reason(response, reason):
    assert read_rewriting(response, "Find the root.") == reason
    ask, asked = scripted(response, response)
    assert decide(problem(), InstructionTemplate(), ask, num_solutions=3).reason == reason
    assert len(asked) == 2


def test_the_last_rewriting_of_a_response_counts():
    response = (
        "<problem>A</problem><answer>1</answer> Better:\n<PROBLEM>\nB\n</PROBLEM>\n<answer> $1,000$"
        " </answer>"
    )
    assert read_rewriting(response, "Q") == ("B", "1000")


@pytest.mark.parametrize(
    ("response", "integer"),
    [
        ("Answer: 3\nNo:\n**Answer:** $-12$.", "-12"),
        ("so \\boxed{7}", "7"),
        ("\\boxed{7}\nFinal answer: 8", "8"),
        ("Answer: 1/2", None),
        ("Answer:", None),
        ("so the answer: 3", None),
        ("<think>Answer: 3</think> unsure", None),
        (f"Answer: {'9' * 5000}", None),
    ],
)
def test_solutions_are_read_from_the_last_answer_line_or_box(response, integer):
    assert read_solution(response) == integer


def test_integers_are_written_in_plain_digits():
    assert [read_integer(text) for text in ("007", "−5", "2.0", "two")] == ["7", "-5", None, None]


def test_integers_pass_and_words_cannot_be_asked_for():
    assert decide_without_model(problem(answer="1,234")).action == "unchanged"
    halves = decide_without_model(problem(answer="4/2"))
    assert (halves.action, halves.answer) == ("unchanged", "2")
    assert (
        decide_without_model(problem(answer="(B)")).reason
        == "the answer is a letter, which contains no integers"
    )
    assert decide_without_model(problem(answer="yes")).action == "rejected"
    assert decide_without_model(problem(answer="1/2")) is None


def test_the_new_problem_keeps_the_instruction_messages_and_fields_around_it():
    instruction_template = InstructionTemplate((("Solve", "this:"),), (("Thank", "you."),))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Solve this:\n\nQ\n\nThank you."},
    ]
    old = problem(messages)
    ask, asked = scripted(REWRITING.format(10), "Answer: 10")
    new = apply(old, decide(old, instruction_template, ask, num_solutions=1), instruction_template)
    assert "problem:\nQ\n" in asked[0][0]
    question = "The root is (a + sqrt(b))/c in {lowest} terms. Find a + b + c."
    assert new.prompt == [
        messages[0],
        {"role": "user", "content": f"Solve this:\n\n{question}\n\nThank you."},
    ]
    assert (new.answer, new.source, new.id) == ("10", "s", problem_id(new.prompt, "10"))
    assert new.fields == {
        "level": 3,
        "original_id": old.id,
        "original_question": "Q",
        "original_answer": old.answer,
    }


# --- the server


def client(url, **options):
    return ChatClient(url, "m", **{"retries": 2, "backoff_s": 0.001, "timeout_s": 10, **options})


def ask(chat):
    return chat.complete(
        [{"role": "user", "content": "q"}], temperature=0.5, max_tokens=9, seed=4
    ).text


def test_a_request_says_what_the_protocol_wants():
    with chat_server(lambda text, n: "hello") as server:
        assert ask(client(f"{server.url}/", api_key="k")) == "hello"
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "q"}],
            "temperature": 0.5,
            "max_tokens": 9,
            "seed": 4,
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer k"


def test_what_may_pass_is_tried_again_and_then_it_is_a_failure():
    with chat_server(lambda text, n: (500, "busy") if n < 2 else "hello") as server:
        assert ask(client(server.url)) == "hello"
    with chat_server(lambda text, n: (503, "busy")) as server:
        with pytest.raises(ServerFailed, match="status 503: busy"):
            ask(client(server.url))
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    "body", ["<html>", "{}", '{"choices": []}', "[1]", '{"choices": [{"message": 3}]}']
)
def test_what_is_no_completion_is_a_failure(body):
    with (
        chat_server(lambda text, n: (200, body)) as server,
        pytest.raises(ServerFailed, match="the answer is not a chat compl"),
    ):
        ask(client(server.url))


def test_a_refused_request_is_not_tried_again():
    with chat_server(lambda text, n: (401, "who are you?")) as server:
        with pytest.raises(ServerRefused, match=r"v1: status 401: who are you\?"):
            ask(client(server.url))
        assert len(server.requests) == 1


def test_a_missing_server_and_a_malformed_address_are_errors():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # held and never listened to, so nobody else answers there
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(ServerFailed, match=r"v1: .*refused"):
            ask(client(address, retries=0))
    with pytest.raises(
        DataError,
        match=r"server 'localhost:8000': expected an address such as http://localhost:8000/v1",
    ):
        client("localhost:8000")


# --- many at once


def test_work_stops_after_too_many_failures_in_a_row():
    def work(item, check):
        raise ServerFailed(str(item))

    failures = concurrent_map(range(100), work, lambda result: None, concurrency=1)
    assert [str(failure) for failure in failures] == [
        str(n) for n in range(MAX_CONSECUTIVE_FAILURES)
    ]


def test_failures_between_successes_do_not_stop_it():
    kept = []

    def work(item, check):
        if item % 2:
            raise ServerFailed("odd")
        return item

    assert len(concurrent_map(range(40), work, kept.append, concurrency=1)) == 20
    assert kept == list(range(0, 40, 2))


def test_as_many_calls_run_at_once_as_asked_for():
    barrier = threading.Barrier(3)
    kept = []
    concurrent_map(
        range(9), lambda item, check: barrier.wait(10) and None, kept.append, concurrency=3
    )
    assert len(kept) == 9


def test_another_error_ends_the_running_ones_and_is_raised():
    ended = threading.Event()

    def work(item, check):
        if item == 0:
            raise ServerRefused("no")
        try:
            while True:
                time.sleep(0.001)
                check()
        finally:
            ended.set()

    with pytest.raises(ServerRefused):
        concurrent_map(range(9), work, lambda result: None, concurrency=2)
    assert ended.is_set()


# --- the command


def by_the_book(text, n):
    """Rewrites the problem that is named `Qi` into one that asks for i, and solves that."""
    name = re.search(r"Q(\d+)", text)[1]
    if "<problem>" in text:
        return f"<problem>New Q{name}.</problem><answer>{name}</answer>"
    return f"Answer: {name}"


def write_rows(path, count=12):
    rows = [{"prompt": f"Q{n}", "answer": "7" if n % 4 == 0 else "\\sqrt{2}"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as stopped:
        main(["data", "integerize", *map(str, arguments)])
    return (stopped.value.code or 0, *capsys.readouterr())


def test_the_command_writes_data_and_decisions(tmp_path, capsys):
    out = tmp_path / "out.jsonl"

    def answer(text, n):
        return "I refuse" if "Q5" in text else by_the_book(text, n)

    with chat_server(answer) as server:
        code, _, err = run(
            capsys, write_rows(tmp_path / "in.jsonl"), out, "--server", server.url, "--model", "m"
        )
    assert code == 0
    assert err.splitlines()[-1] == "integerize: 9/9 problems"
    problems = load_problems(str(out))
    expected = [
        "Q0",
        "New Q1.",
        "New Q2.",
        "New Q3.",
        "Q4",
        "New Q6.",
        "New Q7.",
        "Q8",
        "New Q9.",
        "New Q10.",
        "New Q11.",
    ]
    assert [p.prompt for p in problems] == expected
    assert [p.answer for p in problems] == ["7", "1", "2", "3", "7", "6", "7", "7", "9", "10", "11"]
    decisions = [
        json.loads(line)
        for line in (tmp_path / "out.jsonl.decisions.jsonl").read_text().splitlines()
    ]
    assert [d["action"] for d in decisions].count("rewritten") == 8
    assert decisions[5]["reason"] == "the rewriting has no <problem> or no <answer>"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.decisions.jsonl",
    ]


def test_where_the_server_fails_what_is_done_is_kept_and_the_same_command_goes_on(tmp_path, capsys):
    source = write_rows(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    options = ["--model", "m", "--concurrency", "1", "--retries", "0"]
    with chat_server(
        lambda text, n: (500, "busy") if "Q6" in text else by_the_book(text, n)
    ) as server:
        code, _, err = run(capsys, source, out, "--server", server.url, *options)
    assert code == 1
    assert "1 of 9 problems are undecided: the server failed 1 times" in err
    assert "status 500: busy" in err
    assert not out.exists()
    with chat_server(by_the_book) as server:
        code, stdout, _ = run(capsys, source, out, "--server", server.url, *options)
    assert code == 0
    assert "8 problems were decided before the interruption" in stdout
    assert all("Q6" in text for text in server.texts)
    assert len(load_problems(str(out))) == 12


def test_a_killed_command_goes_on_where_it_was(tmp_path, capsys):
    source = write_rows(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.partial"
    held = threading.Event()

    def answer(text, n):
        if "Q9" in text:
            held.wait(20)
        return by_the_book(text, n)

    options = ["--model", "m", "--concurrency", "1", "--num-solutions", "1"]
    with chat_server(answer) as server:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dapo",
                "data",
                "integerize",
                source,
                str(out),
                "--server",
                server.url,
                *options,
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        wait_until(lambda: any("Q9" in text for text in server.texts), what="the question Q9 asked")
        process.send_signal(signal.SIGKILL)
        process.wait()
        held.set()
    assert not out.exists()
    assert len(journal.read_text().splitlines()) == 1 + 6
    with chat_server(by_the_book) as server:
        assert run(capsys, source, out, "--server", server.url, *options)[0] == 0
    assert {re.search(r"Q\d+", text)[0] for text in server.texts} == {"Q9", "Q10", "Q11"}
    assert [p.answer for p in load_problems(str(out))] == [
        "7",
        "1",
        "2",
        "3",
        "7",
        "5",
        "6",
        "7",
        "7",
        "9",
        "10",
        "11",
    ]
    assert not journal.exists()


def test_bad_input_is_an_error_and_nothing_is_written(tmp_path, capsys):
    source = write_rows(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    with chat_server(lambda text, n: (404, "no model m")) as server:
        code, _, err = run(capsys, source, out, "--server", server.url, "--model", "m")
    assert code == 2
    assert "v1: status 404: no model m" in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    code, _, err = run(
        capsys,
        source,
        out,
        "--server",
        server.url,
        "--model",
        "m",
        "--api-key-env",
        "NO_SUCH_VARIABLE",
    )
    assert (code, err) == (
        2,
        "error: --api-key-env NO_SUCH_VARIABLE: that environment variable is not set\n",
    )
