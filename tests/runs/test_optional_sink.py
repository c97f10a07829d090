"""A tracker that fails or hangs costs the run at most a moment, and gets what it has missed."""

import sys
import threading
from collections.abc import Callable
from itertools import product

import pytest

from dapo.cli.main import main
from dapo.runs.optional_sink import OptionalSink
from dapo.runs.sinks import Metrics
from helpers.tables import for_each_row
from helpers.tiny_runs import CONFIGS, metrics

FAILURES = (
    ConnectionError("no route"),
    BrokenPipeError("the process is gone"),
    TimeoutError(),
    OSError(28, "No space left on device"),
    RuntimeError("closed"),
    SystemExit(1),
    type("Sudden", (BaseException,), {})("an exception of its own kind"),
)


class Script:
    """A tracker that fails at the moments of a script: `open`, `log` or `close` with the number of
    the call.
    """

    def __init__(self, *faults: tuple[str, int], error: BaseException | None = None) -> None:
        self.faults = set(faults)
        self.error = error or RuntimeError("down")
        self.calls = {"open": 0, "log": 0, "close": 0}
        self.opened_at: list[int] = []
        self.taken: list[int] = []

    def step_in(self, moment: str) -> None:
        self.calls[moment] += 1
        if (moment, self.calls[moment]) in self.faults:
            raise self.error

    def open(self, first_step: int) -> "Script":
        self.opened_at.append(first_step)
        self.step_in("open")
        return self

    def log(self, step: int, metrics: Metrics) -> None:
        self.step_in("log")
        self.taken.append(step)

    def close(self) -> None:
        self.step_in("close")


def after_steps(open_sink: Callable[[int], object], count: int, **limits: float) -> list[str]:
    """The warnings of a run of so many steps."""
    warnings: list[str] = []
    sink = OptionalSink("wandb", open_sink, warnings.append, first_step=1, **limits)  # type: ignore[arg-type]
    for step in range(1, count + 1):
        sink.log(step, {"reward/mean": 0.5})
    sink.close()
    return warnings


@for_each_row(
    ["fault", "error"], product([("open", 1), ("log", 1), ("log", 2), ("log", 4)], FAILURES)
)
def test_whatever_fails_once_all_steps_arrive_in_order_and_two_messages_say_so(fault, error):
    script = Script(fault, error=error)
    warnings = after_steps(script.open, 4)
    assert script.taken == [1, 2, 3, 4]
    assert "wandb works again, and has got the steps up to" in warnings.pop()
    does = "cannot be opened" if fault[0] == "open" else "has not taken a step"
    (warning,) = warnings
    assert warning.startswith(f"wandb {does} ({type(error).__name__}")
    assert script.calls["close"] == 1


@pytest.mark.parametrize("moment", ["open", "log"])
def test_a_tracker_that_never_works_is_tried_at_each_step_and_its_steps_are_counted_at_the_end(
    moment,
):
    script = Script(*((moment, call) for call in range(1, 100)))
    first, last = after_steps(script.open, 5)
    assert "the next step tries again" in first
    assert (
        last == "wandb: 5 steps were not delivered, the first is 1; metrics.jsonl has all of them"
    )
    assert script.calls[moment] >= 5


def test_each_kind_of_failure_is_said_once():
    script = Script(("open", 1), ("log", 2), ("log", 5), ("close", 1))
    warnings = after_steps(script.open, 5)
    assert sum("cannot be opened" in each for each in warnings) == 1
    assert sum("has not taken a step" in each for each in warnings) == 1
    assert sum("did not finish (RuntimeError: down" in each for each in warnings) == 1
    assert script.taken == [1, 2, 3, 4, 5]


def test_metrics_that_alone_are_refused_do_not_hold_back_the_others():
    class Picky(Script):
        def log(self, step: int, metrics: Metrics) -> None:
            if step == 2:
                raise TypeError("not this one")
            super().log(step, metrics)

    script = Picky()
    warnings = after_steps(script.open, 5)
    assert script.taken == [1, 3, 4, 5]
    assert (
        warnings[-1]
        == "wandb: 1 step was not delivered, the first is 2; metrics.jsonl has all of them"
    )


def test_a_tracker_that_keeps_refusing_is_opened_again_from_the_first_step_that_it_lacks():
    script = Script(("log", 2), ("log", 3), ("close", 1))
    after_steps(script.open, 4)
    assert script.opened_at == [1, 2]
    assert script.taken == [1, 2, 3, 4]


def test_a_call_that_hangs_is_waited_for_once_and_what_waits_behind_it_is_counted():
    released = threading.Event()

    class Hanging(Script):
        def log(self, step: int, metrics: Metrics) -> None:
            if step == 2:
                released.wait()
            super().log(step, metrics)

    script = Hanging()
    warnings = after_steps(script.open, 50, open_s=60.0, log_s=0.02, close_s=0.02)
    released.set()
    assert "no answer within 0.02 s" in warnings[0]
    assert warnings[-1].startswith("wandb: 49 steps were not delivered, the first is 2")
    assert script.taken[0] == 1


def test_the_users_own_interrupt_reaches_the_run():
    script = Script(("log", 2), error=KeyboardInterrupt())
    sink = OptionalSink("wandb", script.open, lambda text: None, first_step=1)
    sink.log(1, {})
    with pytest.raises(KeyboardInterrupt):
        sink.log(2, {})
    sink.close()


def test_a_key_in_an_error_is_masked(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    script = Script(
        ("open", 1), error=ValueError("bad key 0123456789abcdef0123456789abcdef01234567")
    )
    assert "0123456789abcdef" not in "".join(after_steps(script.open, 1))


WANDB = """
import pathlib
__version__ = "0.19.0"
log = pathlib.Path(__file__).with_name("log.txt")
calls = []
def called(name, *details):
    calls.append(name)
    with log.open("a") as file: print(name, calls.count(name), *details, file=file)
    return calls.count(name)
def init(id, **options):
    if called("init", id) == 1: raise SystemExit("no key")
    return Run()
class Run:
    def log(self, metrics, step):
        if called("log", step) == 2: raise BrokenPipeError("the process is gone")
    def finish(self):
        called("finish")
        raise RuntimeError("cannot finish")
"""


def test_a_run_ends_well_with_a_wandb_that_fails_in_everything(tmp_path, monkeypatch, capsys):
    package = tmp_path / "wandb"
    package.mkdir()
    (package / "__init__.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    options = ["log.sinks=[wandb]", "train.num_steps=3"]
    with pytest.raises(SystemExit) as ended:
        main(["train", str(CONFIGS / "tiny.yaml"), *options, "--run-dir", str(tmp_path / "run")])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert ended.value.code == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]
    calls = [line.split() for line in (package / "log.txt").read_text().splitlines()]
    assert len({call[2] for call in calls if call[0] == "init"}) == 1
    assert [call[2] for call in calls if call[0] == "log"] == ["0", "1", "1", "2", "3"]
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    for part in (
        "(SystemExit: no key",
        "(BrokenPipeError: the process is gone",
        "(RuntimeError: cannot finish",
    ):
        assert shown.count(part) == 1
    assert "free space" not in shown
