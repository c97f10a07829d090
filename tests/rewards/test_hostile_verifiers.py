"""Verifiers that misbehave: each action is an error verdict with its cause, in time, and the next
verdict is right.
"""

import contextlib
import os
import sys
import time

import pytest

from dapo.processes.output import MAX_LOG_BYTES, WorkerOutput
from dapo.processes.supervisor import SHOWN_BYTES
from dapo.rewards.combine import RewardSpec
from dapo.types import Problem, Verdict
from helpers.processes import is_alive, wait_until
from helpers.verifier_pools import open_pool

NAME = "helpers.hostile_functions:does"
PROBLEM = Problem("1", "Q", "A")
TIMEOUT_S = 2.0
SLACK_S = 60.0
LONG_TIMEOUT_S = 30.0
"""For an action that ends by itself or by another limit, on a machine busy with others."""
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits and orphans are those of Linux"),
    pytest.mark.usefixtures("forked_workers"),
]


@pytest.fixture(scope="module")
def pool():
    with open_pool(NAME, timeout_s=LONG_TIMEOUT_S, workers=1, memory_gib=0.5) as opened:
        yield opened


@pytest.fixture(scope="module")
def short_timeout_pool():
    with open_pool(NAME, timeout_s=TIMEOUT_S, workers=1, memory_gib=0.5) as opened:
        yield opened


def judged(pool, response):
    return pool.submit(PROBLEM, [response], [[1]]).result(60)[0]


LATE = "timed out after 2 s"
TOO_LARGE = "the worker process and its descendants used more than 0.5 GiB (reward.memory_gib)"
EXPECTED_ERRORS = {
    "loop": LATE,
    "sleep_through_signals": LATE,
    "stop_itself": LATE,
    "exits": "the worker process exited with code 3",
    "exit_thread": "the worker process exited with code 0",
    "leave": "the worker process was killed by SIGINT",
    "null_pointer": "the worker process was killed by SIGSEGV",
    "kills_its_group": "the worker process was killed by SIGKILL (often: out of memory)",
    "memory": "raised MemoryError (a worker may use reward.memory_gib)",
    "memory_in_children": TOO_LARGE,
    "shared_memory": TOO_LARGE,
    "processes": "the worker process had more than 256 processes running, itself included",
    "chdir": "it left the working directory changed, so its process was replaced",
    "remove_directory {new}": "it left the working directory changed, so its process was replaced",
    "close_output": (
        "it left standard output closed or replaced and left standard error closed or replaced,"
        " so its"
    ),
    "close_everything": "the worker process exited with code 1",
    "close_everything_and_hang": "the worker process closed its connection",
    "replace_descriptors {folder}": "the worker process exited with code 1",
    "forge": "the worker process sent an invalid answer (",
    "endless_message": (
        "the worker process sent an invalid answer (a message of 18446744073709551615 bytes)"
    ),
    "daemon_and_exit {new}": "the worker process exited with code 9",
    "daemon_and_hang {new}": LATE,
}


@pytest.mark.parametrize("action", EXPECTED_ERRORS)
def test_code_that_damages_its_worker_is_an_error_with_its_cause_and_the_worker_is_replaced(
    pool, short_timeout_pool, tmp_path, action
):
    if late := EXPECTED_ERRORS[action] == LATE:
        pool = short_timeout_pool
    before = pool.worker_pids
    start = time.monotonic()
    verdict = judged(pool, action.format(new=tmp_path / "new", folder=tmp_path))
    assert time.monotonic() - start < (TIMEOUT_S if late else LONG_TIMEOUT_S) + SLACK_S
    assert (
        verdict.error.removeprefix(NAME)
        .removeprefix(":")
        .strip()
        .startswith(EXPECTED_ERRORS[action])
    )
    assert (verdict.correct, verdict.score) == (None, 0.0)
    assert judged(pool, "sound") == Verdict(None, 5.0)
    assert pool.worker_pids != before


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("megabyte", None),
        ("escape_codes", None),
        ("fork_and_return", None),
        ("alarm_later", None),
        ("thread", None),
        ("unspeakable", "raised ErrorWithoutText: (its text cannot be read) (hostile_functions.py"),
        ("recursion", "raised RecursionError: maximum recursion depth exceeded"),
        ("long_error", f"raised ValueError: {'x' * 300} (hostile_functions.py"),
    ],
)
def test_code_that_damages_nothing_costs_at_most_its_own_verdict(pool, action, error):
    before = pool.worker_pids
    verdict = judged(pool, action)
    if error is None:
        assert verdict == Verdict(None, float(len(action)))
    else:
        assert verdict.error.startswith(f"{NAME} {error}")
    assert judged(pool, "nap") == Verdict(None, 3.0)  # an alarm left behind would ring in it
    assert pool.worker_pids == before


@pytest.mark.parametrize("action", ["daemon", "daemon_and_exit", "daemon_and_hang"])
def test_a_daemon_with_a_session_of_its_own_ends_with_the_worker_that_started_it(tmp_path, action):
    note = tmp_path / "pid"
    with open_pool(NAME, timeout_s=TIMEOUT_S, workers=1) as pool:
        verdict = judged(pool, f"{action} {note}")
        daemon = int(note.read_text())
        assert (verdict.error is None) == is_alive(daemon) == (action == "daemon")
    assert not is_alive(daemon)


def test_megabytes_of_output_are_shown_in_part_and_counted(capfd):
    with open_pool(NAME, timeout_s=5, workers=1) as pool:
        assert judged(pool, "megabyte") == Verdict(None, 8.0)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("x" * 79 + "\n" + "y" * 1000)
    assert len(captured.err) < SHOWN_BYTES + 200
    assert captured.err.rstrip().endswith("bytes of output not shown]")


def test_what_a_verifier_prints_cannot_drive_the_terminal(capfd):
    with open_pool(NAME, workers=1) as pool:
        judged(pool, "escape_codes")
    assert "?]0;owned??[2J and\ta word\n" in capfd.readouterr().err


def test_a_console_that_takes_nothing_holds_no_verdict_up():
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, b"x" * 65536)
    os.set_blocking(full, True)
    saved = os.dup(2)
    os.dup2(full, 2)
    try:
        with open_pool(NAME, timeout_s=TIMEOUT_S, workers=1) as pool:
            verdicts = [judged(pool, action) for action in ("megabyte", "loop", "megabyte")]
    finally:
        os.dup2(saved, 2)
        for descriptor in (unread, full, saved):
            os.close(descriptor)
    assert [verdict.error for verdict in verdicts] == [None, f"{NAME}: {LATE}", None]


def test_weights_that_lead_out_of_the_numbers_are_an_error():
    spec = RewardSpec.of({"a": 1e308, "b": 1e308})
    expected = "a, b: the weighted sum of the scores is inf, expected 1e+12 at most in size"
    assert spec.combine([Verdict(None, 1.0), Verdict(None, 1.0)]).error == expected
    for score in (1e308, -1e308, float("nan")):
        error = RewardSpec.of("a").combine([Verdict(None, score)]).error
        assert error == f"a: the score is {score:g}, expected 1e+12 at most in size"


def test_five_percent_hanging_verifiers_cost_their_time_limit_and_little_more():
    """80 verdicts of 20 ms, 4 of them never: what the limit implies is 4 times 2 s over two
    workers. What a verdict and the start of a worker take is measured on the machine as it is, and
    a sound verdict has a hundred times its time. One of three measurements must hold: a busy
    machine stalls single ones.
    """
    assert any(hangs_cost_little_more_than_their_limit() for _ in range(3))


def hangs_cost_little_more_than_their_limit():
    timeout_s = 2.0
    count = 80
    workers = 2
    texts = ["sleep" if i % 20 == 10 else f"Answer: {i}" for i in range(count)]
    begun = time.monotonic()
    with open_pool(
        "helpers.hostile_functions:does_slowly", timeout_s=timeout_s, workers=workers
    ) as pool:
        pool.submit(PROBLEM, ["a"] * 8, [[1]] * 8).result(60)  # both are up
        start_s = time.monotonic() - begun
        start = time.monotonic()
        pool.submit(PROBLEM, ["a"] * count, [[1]] * count).result(60)
        without_hangs_s = time.monotonic() - start
        start = time.monotonic()
        verdicts = pool.submit(PROBLEM, texts, [[1]] * count).result(60)
        took = time.monotonic() - start
    late = [verdict.error is not None for verdict in verdicts]
    assert late == [text == "sleep" for text in texts]
    hangs_s = sum(late) * timeout_s / workers
    assert hangs_s <= took
    return took < 1.3 * (without_hangs_s + hangs_s) + start_s


def test_what_verifiers_of_a_run_print_is_in_its_file_once_and_what_is_left_on_the_console(
    tmp_path, capfd
):
    output = WorkerOutput()
    log = tmp_path / "logs" / "verifier.log"
    with open_pool(NAME, workers=1, output=output) as pool:
        judged(pool, "escape_codes")
        # the end of a line is a write of its own, which may come after the verdict
        wait_until(lambda: output.move_to(log).endswith(b"\n"))
        assert output.move_to(log) == b"", "nothing is moved twice"
        judged(pool, "escape_codes")
    line = "?]0;owned??[2J and\ta word\n"
    assert log.read_text() == line
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", line)


def test_the_file_of_what_verifiers_print_is_bounded(tmp_path):
    log = tmp_path / "verifier.log"
    output = WorkerOutput()
    os.truncate(output.fileno(), MAX_LOG_BYTES + 100)
    assert len(output.move_to(log)) == MAX_LOG_BYTES + 100
    assert log.read_bytes()[MAX_LOG_BYTES:] == b"\n[000000000000100 bytes more are not kept]\n"
    os.pwrite(output.fileno(), b"more", MAX_LOG_BYTES + 100)
    assert output.move_to(log) == b"more"
    output.close()
    resumed = WorkerOutput()  # of the process that goes on with the run
    os.pwrite(resumed.fileno(), b"x" * 1000, 0)
    resumed.move_to(log)
    assert log.read_bytes()[MAX_LOG_BYTES:] == b"\n[000000000001104 bytes more are not kept]\n"
    resumed.close()
