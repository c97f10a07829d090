"""Worker processes: what hangs, dies or lies costs its own verdicts only, and nothing is left
behind.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo.core.environment import worker_environment
from dapo.core.errors import RewardError
from dapo.core.loading import import_locations
from dapo.processes.frames import encode
from dapo.processes.process import WorkerLost, WorkerProcess, WorkerProgram, readable
from dapo.processes.spawn import exit_reason
from dapo.rewards import InlineJudge
from dapo.rewards.combine import RewardSpec
from dapo.rewards.pool import _rows_of
from dapo.types import Problem, Verdict
from helpers.paths import TESTS
from helpers.processes import (
    disturbed_verifiers,
    is_alive,
    kill_both,
    kill_supervisor,
    kill_worker,
    stop_and_continue_both,
    stop_both,
    stop_worker,
    terminate_worker,
    wait_until_ended,
)
from helpers.verifier_pools import open_pool

F = "helpers.reward_functions:"
PROBLEM = Problem("1", "What is 6 * 7?", "42", "s", {"level": 3})
TIMEOUT_S = 10.0


def submit(pool, responses, problem=PROBLEM):
    return pool.submit(problem, responses, [[1, 2]] * len(responses))


def judged(pool, responses, problem=PROBLEM):
    return submit(pool, responses, problem).result(60)


def children():
    """Worker processes of this process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid() and b"dapo.rewards.worker" in command:
            found.append(int(entry.name))
    return found


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks at processes through /proc"
)


def test_a_number_beyond_every_float_in_a_forged_answer_is_no_verdict():
    for numbers in ((10**400, {}), (0.0, {"part": 10**400}), (float("nan"), {})):
        score, components = numbers
        answer = {"verdicts": [[[None, score, None, None, components]]]}
        with pytest.raises(WorkerLost, match="did not answer with a verdict"):
            _rows_of(answer, 1, 1)
    answer = {"verdicts": [[[True, 1, None, "a", {"part": 2}]]]}
    assert _rows_of(answer, 1, 1) == [[Verdict(True, 1.0, None, "a", {"part": 2})]]


@pytest.fixture(scope="module")
def scripted_pool():
    """A pool of one verifier that does what the responses say."""
    with open_pool(f"{F}acts", timeout_s=1.0, workers=2) as pool:
        yield pool


def test_verdicts_come_in_the_order_of_the_responses():
    with open_pool("exact", workers=2) as pool:
        verdicts = judged(pool, ["42", "41", "42.", "x"])
    assert verdicts == (
        Verdict(True, 1.0),
        Verdict(False, -1.0),
        Verdict(True, 1.0),
        Verdict(False, -1.0),
    )


SPEC = {
    "exact": 1.0,
    "gsm8k": 1.0,
    f"{F}not_applicable_to_short": 0.5,
    f"{F}raises_on_bad": 0.25,
    f"{F}acts": 0.125,
}
RESPONSES = [
    "42",
    "Answer: 42",
    "bad",
    "a",
    "raise",
    "#### 41",
    "",
    "\ud83d lone \udc4d",
    "é\u2028\x00",
]


def test_one_worker_four_workers_and_none_give_the_same_verdicts():
    problems = [Problem(str(n), "Q", str(n)) for n in range(40, 46)]
    results = []
    for judge in (
        InlineJudge(SPEC),
        open_pool(SPEC, timeout_s=TIMEOUT_S, workers=1),
        open_pool(SPEC, timeout_s=TIMEOUT_S, workers=4),
    ):
        with judge:
            futures = [submit(judge, RESPONSES, problem) for problem in problems]
            results.append([future.result(60) for future in futures])
    assert results[0] == results[1] == results[2]
    # exact says wrong, gsm8k right; 42 is the third problem; "bad" makes only its own part fail
    assert results[0][2][1] == Verdict(False, -1.0 + 1.0 + 0.5 + 0.25 + 0.125 * 10)
    assert results[0][2][2].error.startswith(f"{F}raises_on_bad raised ValueError")


def test_what_a_function_gets_wrong_is_an_error_as_in_process():
    for name in ("not_a_number", "one_too_few", "async_length", "sees"):
        responses = ["nan", "inf", "bad", "bb"]
        with open_pool(f"{F}{name}", workers=1) as pool, InlineJudge(f"{F}{name}") as judge:
            assert judged(pool, responses) == judged(judge, responses)


def test_a_hang_costs_one_verdict_and_the_worker_is_replaced(scripted_pool):
    before = scripted_pool.worker_pids
    verdicts = judged(scripted_pool, ["a", "hang", "bb", "ccc"])
    assert [verdict.error for verdict in verdicts] == [
        None,
        f"{F}acts: timed out after 1 s",
        None,
        None,
    ]
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 2.0, 3.0]
    assert judged(scripted_pool, ["a"] * 8) == (Verdict(None, 1.0),) * 8
    assert scripted_pool.worker_pids != before


def test_a_hang_that_never_gives_up_the_interpreter_is_ended_too(scripted_pool):
    assert judged(scripted_pool, ["hang in C"])[0].error == f"{F}acts: timed out after 1 s"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("exit", "the worker process exited with code 3"),
        ("segfault", "the worker process was killed by SIGSEGV"),
        ("kill", "the worker process was killed by SIGKILL (often: out of memory)"),
        ("close", "the worker process closed its connection"),
        ("raise", "raised RuntimeError: as asked (reward_functions.py, line"),
    ],
)
def test_a_death_costs_one_verdict_and_says_how(scripted_pool, response, reason):
    first, offender, last = judged(scripted_pool, ["a", response, "bb"])
    assert (first, last) == (Verdict(None, 1.0), Verdict(None, 2.0))
    assert reason in offender.error
    assert offender.error.startswith(f"{F}acts")


def test_a_real_time_signal_which_has_no_name_is_said_by_its_number():
    assert exit_reason(-40, by_signal="was killed by") == "was killed by signal 40"


@needs_proc
@pytest.mark.parametrize(
    "disturbance",
    [
        kill_worker,
        terminate_worker,
        kill_supervisor,
        kill_both,
        stop_worker,
        stop_both,
        stop_and_continue_both,
    ],
)
def test_a_worker_that_is_killed_or_stopped_from_outside_costs_no_verdict(tmp_path, disturbance):
    timeout_s = 1.0 if disturbance in (stop_worker, stop_both) else 60.0
    options = {"folder": str(tmp_path), "every": 1}
    messages = []
    with (
        open_pool(
            f"{F}waits_for_a_signal", timeout_s=timeout_s, workers=1, options=options
        ) as pool,
        disturbed_verifiers(tmp_path, [disturbance]) as disturbances,
    ):
        pool.log_to(messages.append)
        assert judged(pool, ["7", "a"]) == (Verdict(True, 1.0), Verdict(False, -1.0))
    assert len(disturbances) == 2
    assert len(list(tmp_path.glob("*.call*"))) == 4
    assert len(messages) == 2
    assert messages[0].startswith("a verifier process was lost: ")


@needs_proc
def test_a_worker_that_is_killed_while_it_is_idle_costs_nothing():
    with open_pool("exact", workers=1) as pool:
        for _ in range(4):
            (worker,) = pool.worker_pids
            os.kill(worker, signal.SIGKILL)
            wait_until_ended(worker)
            assert judged(pool, ["42"]) == (Verdict(True, 1.0),)


def test_a_process_that_is_killed_while_it_starts_is_started_again(tmp_path, monkeypatch):
    (tmp_path / "dies_once.py").write_text(
        "import os, pathlib, signal\nflag = pathlib.Path(__file__).with_suffix('.flag')\nif not"
        " flag.exists():\n    flag.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\ndef"
        " f(problem, response):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with open_pool("dies_once:f", workers=1) as pool:
        assert judged(pool, ["a"]) == (Verdict(None, 1.0),)
    assert (tmp_path / "dies_once.flag").exists()


def test_a_function_that_kills_its_process_each_time_is_asked_three_times(tmp_path):
    with open_pool(f"{F}kills_itself", workers=1, options={"folder": str(tmp_path)}) as pool:
        assert "the worker process was killed by SIGKILL" in judged(pool, ["a"])[0].error
    assert len(list(tmp_path.iterdir())) == 3


def test_what_a_function_prints_corrupts_nothing(scripted_pool, capfd):
    assert judged(scripted_pool, ["print", "a"]) == (Verdict(None, 5.0), Verdict(None, 1.0))
    captured = capfd.readouterr()
    assert captured.out == ""


def test_a_group_function_that_hangs_costs_its_group_and_no_other():
    with open_pool({f"{F}hang_group": 1.0, "exact": 1.0}, timeout_s=1.0, workers=2) as pool:
        bad = submit(pool, ["42", "hang"])
        good = submit(pool, ["42", "x"])
        assert [verdict.error for verdict in bad.result(60)] == [
            f"{F}hang_group: timed out after 2 s"
        ] * 2
        assert good.result(60) == (Verdict(True, 2.0), Verdict(False, 0.0))


@needs_proc
def test_what_a_hung_function_has_started_ends_with_it(scripted_pool, tmp_path):
    note = tmp_path / "pid"
    assert "timed out" in judged(scripted_pool, [f"child {note}"])[0].error
    wait_until_ended(int(note.read_text()))


def test_workers_have_no_torch_one_thread_and_one_hash_seed():
    with open_pool(f"{F}about_the_worker", workers=2) as pool:
        rows = [judged(pool, ["pid", "torch", "threads", "hash"]) for _ in range(8)]
    assert {row[1].score for row in rows} == {0.0}
    assert {row[2].score for row in rows} == {1.0}
    assert len({row[3].score for row in rows}) == 1
    assert os.getpid() not in {row[0].score for row in rows}


@needs_proc
def test_closing_leaves_no_process_and_answers_what_is_still_out():
    pool = open_pool(f"{F}acts", timeout_s=60, workers=2)
    assert judged(pool, ["a"]) == (Verdict(None, 1.0),)
    pids = pool.worker_pids
    futures = [submit(pool, ["hang"] * 3) for _ in range(3)]
    time.sleep(0.1)
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 50  # less than the minute that a verdict may take
    assert not any(is_alive(pid) for pid in pids)
    assert pool.worker_pids == []
    for future in futures:
        with pytest.raises(RewardError, match="the verifier pool was closed before this verdict"):
            future.result(1)
    with pytest.raises(RewardError, match="the verifier pool is closed"):
        submit(pool, ["a"])


@needs_proc
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verifier": "maths"}, "unknown verifier 'maths'; did you mean math?"),
        ({"verifier": "no_such_module:f"}, "there is no module 'no_such_module'"),
        ({"verifier": f"{F}lenght"}, "did you mean length?"),
        ({"verifier": "exact", "options": {"extract": 3}}, "exact: extract must be one of"),
        ({"verifier": "exact", "options": {"extract": {1, 2}}}, "options must be JSON values"),
        (
            {"verifier": "__main__:f"},
            "'__main__:f': worker processes cannot import a running script or notebook",
        ),
        ({"verifier": {}}, "no verifier"),
    ],
)
def test_a_verifier_that_cannot_be_built_is_refused_at_once_and_leaves_no_process(
    arguments, message
):
    before = set(children())
    with pytest.raises(RewardError) as caught:
        open_pool(**{"workers": 1, **arguments})
    assert message in str(caught.value)
    assert set(children()) <= before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import time; time.sleep(60)", "the worker process was not ready after 0.5 s"),
        ("import os; os._exit(7)", "the worker process exited with code 7"),
    ],
)
def test_a_module_that_keeps_its_worker_from_starting_is_refused(
    tmp_path, monkeypatch, source, message
):
    (tmp_path / "stuck.py").write_text(f"{source}\ndef f(problem, response): return True")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError) as caught:
        open_pool("stuck:f", startup_s=0.5 if "sleep" in source else 30)
    assert message in str(caught.value)


def test_a_worker_that_cannot_be_replaced_is_an_error_not_a_hang(tmp_path, monkeypatch):
    (tmp_path / "once.py").write_text(
        "import os, pathlib\n"
        "if pathlib.Path('used').exists(): raise ImportError('only once')\n"
        "def f(problem, response):\n"
        "    pathlib.Path('used').touch()\n"
        "    os._exit(1)\n"
    )
    monkeypatch.chdir(tmp_path)
    with open_pool("once:f", workers=1) as pool:
        first, second = (judged(pool, ["a"])[0].error for _ in range(2))
    assert first == "once:f: the worker process exited with code 1"
    assert second.startswith(
        "once:f: no worker process: 'once:f': importing once raised ImportError: only once"
    )


def test_modules_of_the_current_directory_reach_the_workers_and_hide_nothing(tmp_path, monkeypatch):
    (tmp_path / "mine_here.py").write_text("def f(problem, response): return response == 'yes'")
    (tmp_path / "random.py").write_text("raise ImportError('not the random you think')")
    monkeypatch.chdir(tmp_path)
    with open_pool("math", workers=1) as pool:
        assert judged(pool, ["Answer: 6 \\times 7 = 42"]) == (Verdict(True, 1.0),)
    with open_pool("mine_here:f", workers=1) as pool:
        assert judged(pool, ["yes"]) == (Verdict(True, 1.0),)


def test_fields_that_are_not_json_are_refused():
    with open_pool("exact", workers=1) as pool:
        with pytest.raises(RewardError, match="problem 'p' has a field that is not JSON"):
            submit(pool, ["a"], Problem("p", "Q", "A", "", {"when": object()}))
        with pytest.raises(ValueError, match="2 responses, but the tokens of 1"):
            pool.submit(PROBLEM, ["a", "b"], [[1]])
        assert judged(pool, []) == ()


# the parent's own end: a script that opens a pool, prints the workers, and goes


PARENT = f"""
import sys, time
sys.path.insert(0, {str(TESTS)!r})
from dapo.types import Problem
from helpers.verifier_pools import open_pool
pool = open_pool("{F}acts", timeout_s=60, workers=2)
assert pool.submit(Problem("1", "Q", "A"), ["a", "b"], [[1], [1]]).result()
"""


def parent(last_lines):
    return subprocess.Popen(
        [sys.executable, "-c", PARENT + last_lines], stdout=subprocess.PIPE, text=True
    )


@needs_proc
@pytest.mark.parametrize("response", ["a", "hang", "hang in C"])
def test_workers_end_when_the_parent_is_killed(response):
    work = f"pool.submit(Problem('1', 'Q', 'A'), [{response!r}] * 2, [[1]] * 2); time.sleep(0.2)"
    with parent(f"{work}\nprint(*pool.worker_pids, flush=True); time.sleep(60)") as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until_ended(*pids)


@needs_proc
def test_a_parent_that_forgets_to_close_still_ends_and_takes_its_workers_along():
    with parent("print(*pool.worker_pids, flush=True)") as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert process.wait(TIMEOUT_S) == 0
        wait_until_ended(*pids)


def test_a_worker_gets_the_variables_that_it_needs_and_those_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "spies").mkdir()
    (tmp_path / "spies" / "__init__.py").write_text("")
    (tmp_path / "spies" / "spy.py").write_text(
        "import os\n\n\ndef reward(completions, key_env='', **columns):\n"
        "    raise ValueError(' '.join(sorted(os.environ)) + (' ' + os.environ['JUDGE_KEY'])[:0])\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("ANTHROPIC_API_KEY", "DATABASE_URL", "JUDGE_KEY", "NAMED_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "zqK7vX31")
    monkeypatch.setenv("HF_HOME", "/hub")
    with open_pool("spies.spy:reward", options={"key_env": "NAMED_KEY"}, workers=1) as pool:
        (verdict,) = pool.submit(Problem("p", "q", "a"), ["r"], [[1]]).result()
    found = set((verdict.error or "").split())
    assert {"HF_HOME", "JUDGE_KEY", "NAMED_KEY"} <= found
    assert not {"ANTHROPIC_API_KEY", "DATABASE_URL", "HF_TOKEN"} & found


def test_the_error_of_a_worker_that_has_ended_before_it_is_asked_is_read() -> None:
    spec = RewardSpec.of("math", options={"tolerance": 1})
    first_message = encode({"spec": vars(spec), **import_locations()})
    program = WorkerProgram(
        "dapo.rewards.worker", first_message, worker_environment(), "verifier", RewardError
    )
    worker = WorkerProcess(program, memory_bytes=2**31)
    worker.begin()
    assert readable(worker._report.fileno(), 60)  # its supervisor reports the end
    with pytest.raises(WorkerLost, match="verifier math has no option 'tolerance'"):
        worker.wait_ready(60)
    worker.stop()
