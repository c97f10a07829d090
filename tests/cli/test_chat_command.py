"""`dapo chat` and `dapo generate`: what a person and a pipe see, and what is refused."""

import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dapo
from dapo.core.text import one_line
from helpers.commands import run
from helpers.fake_chat_server import MODEL, chat_server
from helpers.paths import ROOT
from helpers.tables import for_each_row

SHORT = ("--max-new-tokens", "6")
AS_GENERATED = (*SHORT, "--top-p", "1")
LONG_PROMPT = "12 + 34 = " * 900
"""More characters than the random model's context has tokens."""


def say(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    lines: str,
    *arguments: str,
) -> tuple[int, str, str]:
    """What `dapo chat` or `dapo generate` does with lines of a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return run(capsys, *arguments)


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_generate_gives_the_answers_of_run_generate(
    capsys: pytest.CaptureFixture[str], sync_run: Path, tmp_path: Path
):
    run_object = dapo.load(sync_run)
    prompts = ["1 + 2 =", "4 + 4 ="]
    answers = run_object.generate(prompts, samples=2, max_new_tokens=6, seed=3, top_p=0.9)
    run_object.close()
    words = (*SHORT, "--n", "2", "--seed", "3", "--top-p", "0.9")
    code, out, _ = run(capsys, "generate", str(sync_run), *prompts, *words, "--json")
    assert code == 0
    objects = rows(out)
    assert [row["prompt"] for row in objects] == [text for text in prompts for _ in range(2)]
    assert [row["response"] for row in objects] == [text for pair in answers for text in pair]
    assert {row["sample"] for row in objects} == {0, 1}
    assert {(row["seed"], row["step"], row["model"]) for row in objects} == {(3, 4, str(sync_run))}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    lines = tmp_path / "lines.txt"
    lines.write_text("\n\n".join(prompts))
    for source in (file, lines):
        _, again, _ = run(
            capsys, "generate", str(sync_run), "--file", str(source), *words, "--json"
        )
        assert again == out
    code, text, err = run(capsys, "generate", str(sync_run), *prompts, *words)
    shown = [
        f"> {prompt}\n[1] {pair[0]}\n[2] {pair[1]}\n"
        for prompt, pair in zip(prompts, answers, strict=True)
    ]
    assert (code, one_line(text)) == (0, one_line("\n".join(shown)))
    assert "after step 4, trained from tiny-random" in err


def test_a_checkpoint_of_a_step_answers(capsys: pytest.CaptureFixture[str], sync_run: Path):
    found = [
        rows(run(capsys, "generate", str(sync_run), "1 + 2 =", "--step", step, "--json")[1])
        for step in ("1", "4")
    ]
    assert [row[0]["step"] for row in found] == [1, 4]
    assert found[0][0]["response"] != found[1][0]["response"]


def test_lines_of_a_pipe_are_messages_and_the_first_answer_is_that_of_generate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    _, generated, _ = run(capsys, "generate", "tiny-random", "1 + 2 =", *AS_GENERATED, "--json")
    lines = "1 + 2 =\n\n/help\n/retry\n/undo\n"
    code, out, err = say(capsys, monkeypatch, lines, "chat", "tiny-random", *AS_GENERATED)
    assert code == 0
    answers = out.splitlines()
    assert answers[0] == rows(generated)[0]["response"]
    assert len(answers) == 2
    assert answers[0] != answers[1]
    assert "> " not in out
    assert "\x1b" not in out + err
    notes = one_line(err)
    assert "no chat template: each message is continued as plain text" in notes
    assert "(taken back: 1 + 2 =)" in notes
    assert "/compare [TEXT]" in notes


def test_compare_shows_both_models_and_keeps_the_trained_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sync_run: Path
):
    lines = "1 + 2 =\n/compare\n/compare 4 + 4 =\n"
    code, out, err = say(capsys, monkeypatch, lines, "chat", str(sync_run), *SHORT)
    assert code == 0
    answer, *compared = out.splitlines()
    assert compared[0::2] == ["untrained:", "trained:"] * 2
    untrained, trained = compared[1], compared[3]
    assert trained == answer
    assert untrained != trained
    code, out, _ = say(capsys, monkeypatch, "1 + 2 =\n", "chat", str(sync_run), *SHORT, "--compare")
    assert out.splitlines() == compared[:4]
    assert "after step 4, trained from tiny-random" in one_line(err)


def test_a_conversation_that_fills_the_context_is_a_sentence_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = f"{LONG_PROMPT}\n/nope\n1 + 2 =\n"
    code, out, err = say(capsys, monkeypatch, lines, "chat", "tiny-random", *SHORT)
    assert code == 2
    assert len(out.splitlines()) == 1
    notes = one_line(err)
    assert "fills the context of the model, which is 4,096 tokens long" in notes
    assert "there is no command /nope: did you mean /compare?" in notes


@for_each_row(
    ("words", "message"),
    [
        (("generate", "tiny-random", ""), "prompt 1 is empty"),
        (("generate", "tiny-random", "a", " "), "prompt 2 is empty"),
        (("generate", "tiny-random", "--file", "nope.txt"), "nope.txt: No such file"),
        (("generate", "tiny-random", "--file", "nope.jsonl"), "no data file nope.jsonl"),
        (("generate", "tiny-random"), "the standard input has no prompts"),
        (("generate", "tiny-random", LONG_PROMPT), "fills the context of the model"),
        (("generate", "tiny-random", "a", "--top-p", "0"), "--top-p: expected a number above 0"),
        (("generate", "tiny-random", "a", "--step", "3"), "tiny-random is not a run directory"),
        (("generate", "tiny-randon", "a"), "did you mean tiny-random?"),
        (("chat", "no-such-model"), "model 'no-such-model' is not an alias"),
        (("chat", "/no/such"), "there is no such directory"),
        (("chat", "tiny-random", "--compare"), "--compare needs a run"),
        (
            ("chat", "tiny-random", "--system", "Be brief."),
            "a system message needs a chat template",
        ),
        (("chat", "m", "--server", "http://127.0.0.1:9/v1"), "cannot be reached"),
        (("ask", "runs/a"), "dapo chat MODEL_OR_RUN talks to a model"),
        (("sample", "runs/a"), "dapo generate MODEL_OR_RUN PROMPT prints answers"),
        (("deploy", "runs/a"), "dapo serve MODEL_OR_RUN answers at an address"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
):
    code, out, err = say(capsys, monkeypatch, "", *words)
    assert (code, out) == (2, "")
    assert message in one_line(err), err


def test_a_missing_run_beside_others_is_no_hub_id(
    capsys: pytest.CaptureFixture[str], sync_run: Path
):
    code, _, err = run(capsys, "generate", str(sync_run.with_name("synk")), "a")
    assert code == 2
    assert "there is no run" in err
    assert "did you mean sync" in err


def test_a_server_streams_its_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def events(message: str, number: int) -> tuple[int, str]:
        pieces = [{"content": text} for text in ("Ans", "wer\x1b[2J ", message)]
        deltas = [{"choices": [{"delta": piece, "finish_reason": None}]} for piece in pieces]
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        lines = [f"data: {json.dumps(event)}\n\n" for event in [*deltas, end, {"choices": []}]]
        return 200, "".join([": a comment\n", *lines, "data: [DONE]\n\n"])

    with chat_server(events) as server:
        words = ("chat", MODEL, "--server", server.url, "--system", "Be brief.")
        code, out, _ = say(capsys, monkeypatch, "one\ntwo\n", *words)
    assert code == 0
    assert out == "Answer\\x1b[2J one\nAnswer\\x1b[2J two\n"
    roles = [[message["role"] for message in request["messages"]] for request in server.requests]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert server.requests[0]["stream"] is True


class Terminal:
    """A `dapo` process on a pseudo terminal of 80 columns."""

    def __init__(self, *arguments: str) -> None:
        self._descriptor, end = pty.openpty()
        self.text = ""
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dapo", *arguments],
            stdin=end,
            stdout=end,
            stderr=end,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            # the terminal controls the process: Ctrl-C is a signal
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(end)

    def send(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, pattern: str, seconds: float = 180) -> str:
        """Read until a pattern comes, and return what came since the last call."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            ready, _, _ = select.select([self._descriptor], [], [], deadline - time.monotonic())
            assert ready, self.text
            self.text += os.read(self._descriptor, 1 << 16).decode(errors="replace")
        text = self.text
        self.text = ""
        return text

    def close(self) -> None:
        """End the process, if it has not ended."""
        self.process.kill()
        self.process.wait()
        os.close(self._descriptor)


def test_a_terminal_streams_and_ctrl_c_stops_an_answer_and_ctrl_d_the_chat():
    words = ("chat", "tiny-random", "--max-new-tokens", "4000", "--temperature", "0")
    with closing(Terminal(*words)) as terminal:
        start = terminal.until(r"\n> ")
        assert "loading tiny-random" in start
        assert "at most 4,000 tokens" in start
        answer = ""
        for _ in range(9):
            terminal.send("1 + 2 =\n")
            terminal.until(r"=\r\n\S{30}")  # of an answer of thousands
            terminal.send("\x03")
            # on a busy machine, the answer may have ended before
            answer = terminal.until(r"(\(stopped\)|Ctrl-C again)[^>]*> ")
            if "(stopped)" in answer:
                break
        assert "(stopped)" in answer
        time.sleep(1.0)  # until readline waits: a signal before that is seen at the next key
        terminal.send("\x03")
        terminal.until(r"Ctrl-C again[^>]*> ")
        terminal.send("\x04")
        assert terminal.process.wait(20) == 0
