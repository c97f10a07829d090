"""Functions that `dapo.train` calls: they observe a run, sample from it, end it or fail."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dapo
from dapo.api.callbacks import StepMetrics, call
from helpers.tables import for_each_row

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
TRAINED: dict[str, Any] = {
    "data": ROWS,
    "reward": "dapo.rewards.examples:has_digit",
    "steps": 3,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_response_tokens": 6,
    "threads": 1,
    "workers": 1,
    "lr": 1e-3,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_callback_ends_a_run_normally_and_a_loop_over_seeds_goes_on(
    capsys: pytest.CaptureFixture[str],
):
    ends: list[tuple[str, str | None]] = []
    logged: list[int] = []

    def stop(run: dapo.Run, metrics: dict[str, Any]) -> Any:
        if run.config.train.seed == 0:
            raise dapo.Stop("good enough")
        return dapo.STOP if metrics["step"] == 2 else None

    def log(run: dapo.Run, metrics: dict[str, Any]) -> None:
        logged.append(metrics["step"])

    def on_end(run: dapo.Run) -> None:
        ends.append((run.status, run.state.stop_reason))

    runs = [
        dapo.train("tiny-random", seed=seed, on_step=[stop, log], on_end=on_end, **TRAINED)
        for seed in range(2)
    ]
    reasons = ["good enough", "a callback asked for it"]
    assert [run.state.step for run in runs] == [1, 2]
    assert logged == [1, 1, 2], "the other functions of a step are called, too"
    assert ends == [("stopped", reason) for reason in reasons]
    for run, reason in zip(runs, reasons, strict=True):
        assert (run.path / "curves.png").exists()
        assert f": stopped ({reason}), step " in repr(run)
    assert "stopped: good enough; saved: step 1 of 3; continue with: dapo.resume('runs/" in (
        capsys.readouterr().out
    )
    assert dapo.resume(runs[0], on_end=on_end).status == "finished"
    assert ends[-1] == ("finished", None)


def test_a_stop_in_the_last_step_changes_nothing():
    run = dapo.train(
        "tiny-random", on_step=lambda run, metrics: dapo.STOP, **(TRAINED | {"steps": 1})
    )
    assert run.status == "finished"


def _raises_stop_iteration(run: dapo.Run, metrics: dict[str, Any]) -> None:
    raise StopIteration


async def _is_async(run: dapo.Run, metrics: dict[str, Any]) -> None: ...


@for_each_row(
    ("function", "message"),
    [
        (lambda run, metrics: False, "returned False, and `return False` has no effect: end the"),
        (lambda run, metrics: "stop", "has no effect: end the run with `return dapo.STOP` or"),
        (_raises_stop_iteration, "raised StopIteration (test_callbacks.py, line "),
        (_is_async, "on_step: _is_async is async; expected a plain function"),
    ],
)
def test_an_answer_of_a_callback_without_effect_is_refused_at_the_first_step(
    function: Any, message: str
):
    with pytest.raises(dapo.ConfigError) as refused:
        call("on_step", [], function, None, {})
    assert message in str(refused.value)


@for_each_row(
    ("arguments", "message"),
    [
        ({"on_step": 5}, "on_step: expected a function or a list of functions, got 5"),
        ({"on_evaluation": [5]}, "on_evaluation: expected a function or a list of functions"),
        ({"on_step": _is_async}, "on_step: _is_async is async; expected a plain function"),
        ({"on_end": _is_async}, "on_end: _is_async is async"),
        (
            {"on_evaluation": _raises_stop_iteration, "on_end": _raises_stop_iteration},
            "on_end: _raises_stop_iteration(run, metrics) is called as _raises_stop_iteration(run)",
        ),
        ({"on_end": "print"}, "on_end: expected a function or a list of functions, got 'print'"),
        (
            {"sinks": [5]},
            "sinks: expected names of trackers or objects with write(step, metrics), got 5",
        ),
    ],
)
def test_what_is_no_callback_is_refused_before_anything_is_written(
    arguments: dict[str, Any], message: str
):
    with pytest.raises(dapo.ConfigError) as refused:
        dapo.train("tiny-random", run_dir="run", **(TRAINED | arguments))
    assert message in str(refused.value)
    assert not Path("run").exists()


@for_each_row(
    ("name", "answer"),
    [
        ("reward/maen", "no metric 'reward/maen' in step 2; did you mean reward/mean?"),
        ("eval/held_out/accuracy", "evaluations are not made after each step"),
        ("xyzzy", "`list(metrics)` has all names"),
    ],
)
def test_a_metric_that_a_step_lacks_is_answered_with_the_nearest_name(name: str, answer: str):
    metrics = StepMetrics({"step": 2, "reward/mean": 0.5})
    with pytest.raises(KeyError, match=re.escape(answer)):
        metrics[name]
    assert metrics.get(name) is None


def test_evaluations_reach_their_callback_from_the_first_one_on():
    seen: list[tuple[str, int, float | None]] = []

    def on_evaluation(run: dapo.Run, evaluation: Any) -> None:
        seen.append(("evaluation", len(run.metrics), evaluation.accuracy))

    def on_step(run: dapo.Run, metrics: dict[str, Any]) -> None:
        seen.append(("step", len(run.metrics), metrics.get("eval/held_out/accuracy")))

    run = dapo.train(
        "tiny-random",
        on_evaluation=on_evaluation,
        on_step=on_step,
        **(TRAINED | {"data": ROWS[2:], "eval_data": ROWS[:2], "steps": 2}),
    )
    first, last = run.evaluations["accuracy"]
    assert seen == [
        ("evaluation", 1, first),
        ("step", 2, None),
        ("evaluation", 3, last),
        ("step", 3, last),
    ]


def test_a_sink_that_fails_costs_one_warning_unless_it_is_required(
    capsys: pytest.CaptureFixture[str],
):
    class Full:
        def write(self, step: int, metrics: Any) -> None:
            raise OSError("no space")

    class Required(Full):
        required = True

    run = dapo.train("tiny-random", sinks=[Full()], **TRAINED)
    assert run.status == "finished"
    assert capsys.readouterr().out.count("the sink Full has not taken step 1 (OSError: no") == 1
    with pytest.raises(OSError, match="no space") as failed:
        dapo.train("tiny-random", sinks=[Required()], **TRAINED)
    assert failed.value.run.state.checkpoint["step"] == 1  # type: ignore[attr-defined]


def test_ctrl_c_and_exit_in_a_callback_save_the_state():
    def interrupt(run: dapo.Run, metrics: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    def leave(run: dapo.Run, metrics: dict[str, Any]) -> None:
        sys.exit(3)

    for function, kind, status in (
        (interrupt, dapo.TrainingInterrupted, "stopped"),
        (leave, SystemExit, "failed"),
    ):
        with pytest.raises(kind) as ended:
            dapo.train("tiny-random", on_step=function, **TRAINED)
        run = ended.value.run  # type: ignore[attr-defined]
        assert run.status == status
        assert run.state.checkpoint["step"] == 1


def test_an_error_in_on_end_is_the_callers_and_a_warning_where_the_run_has_failed(
    capsys: pytest.CaptureFixture[str],
):
    def fails(run: dapo.Run, metrics: Any = None) -> None:
        raise ZeroDivisionError(run.status)

    with pytest.raises(ZeroDivisionError, match="finished") as ended:
        dapo.train("tiny-random", on_end=fails, **(TRAINED | {"steps": 1}))
    assert ended.value.run.status == "finished"  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError, match="running"):
        dapo.train("tiny-random", on_step=fails, on_end=fails, **TRAINED)
    assert "on_end raised ZeroDivisionError: failed" in capsys.readouterr().err


SCRIPT = """
import dapo
def fails(run, metrics):
    return metrics["no such metric"]
dapo.train("tiny-random", on_step=fails, **TRAINED)
"""


def test_a_script_shows_its_own_frames_only_of_an_error_in_its_callback(tmp_path: Path):
    Path("script.py").write_text(f"TRAINED = {TRAINED!r}\n{SCRIPT}")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count('File "') == 2
    assert done.stderr.endswith(
        "no metric 'no such metric' in step 1; `list(metrics)` has all names\n"
    )
    assert "python_errors.py" not in done.stderr


def test_each_error_that_ends_a_run_has_the_run():
    def fails(completions: list[str], **columns: Any) -> list[float]:
        raise ValueError("oh no")

    with pytest.raises(dapo.RewardError) as ended:
        dapo.train("tiny-random", **(TRAINED | {"reward": fails}))
    assert ended.value.run.status == "failed"


def test_the_options_of_a_run_are_not_changed_in_place():
    config = dapo.load(dapo.train("tiny-random", **(TRAINED | {"steps": 1})).path).config
    with pytest.raises(dapo.ConfigError, match=r"lr: the options of a run cannot be changed in "):
        config.optim.lr = 1e-9  # type: ignore[misc]
