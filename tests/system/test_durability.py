"""What happens to a run when signals come, disks fill, steps fail in their middle: the state is
saved, and exact.
"""

import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dapo.cli.train import resume_run, start_run
from dapo.config import Config
from dapo.core.errors import CheckpointError, DapoError, NumericsError, RewardError
from dapo.core.waiting import Interrupted
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import JsonlSink
from dapo.training.checkpoint_writer import StorageError
from dapo.training.saved_state import read_state
from dapo.training.signals import StopRequest
from dapo.training.state import TrainState
from dapo.training.train import train
from dapo.types import GenerationRequest
from helpers.fork_server import ForkServer
from helpers.processes import (
    disturbed_verifiers,
    go_on,
    kill_both,
    kill_supervisor,
    kill_worker,
    stop_and_continue_both,
    stop_both,
    stop_worker,
)
from helpers.tiny_runs import CONFIGS, contents, differences, metrics, new_run, saved_steps, tiny

STEPS = (
    "train.num_steps=4",
    "train.save_every=2",
    "train.eval_every=3",
    "dynamic_sampling.max_groups_per_step=40",
)
LAST = "step_000004"


@pytest.fixture(scope="module")
def counted(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, int]]:
    """The uninterrupted run, and how many calls it made in each area."""
    run = tmp_path_factory.mktemp("whole") / "run"
    code, calls = fork_server.run(*train_command(run), output=run.with_name("log"), count=True)
    assert code == 0, run.with_name("log").read_text()
    return run, calls


@pytest.fixture(scope="module")
def whole(counted: tuple[Path, dict[str, int]]) -> Path:
    """The uninterrupted run."""
    return counted[0]


def train_command(run: Path) -> list[str]:
    return ["train", str(CONFIGS / "tiny.yaml"), "train.threads=1", *STEPS, "--run-dir", str(run)]


def assert_ends_like(run: Path, whole: Path) -> None:
    """Same metrics, rollouts, evaluations, and last checkpoint."""
    resume_run(run, [])
    assert differences(contents(run, checkpoints=LAST), contents(whole, checkpoints=LAST)) == []


class TestSignals:
    @pytest.mark.parametrize(
        ("signum", "code", "area"),
        [
            (signal.SIGINT, 130, "rollout"),
            (signal.SIGTERM, 143, "update"),
            (signal.SIGTERM, 143, "judging"),
            (signal.SIGINT, 130, "saving"),
        ],
    )
    def test_a_signal_saves_says_how_to_continue_and_loses_nothing(
        self,
        fork_server: ForkServer,
        counted: tuple[Path, dict[str, int]],
        tmp_path: Path,
        signum: int,
        code: int,
        area: str,
    ):
        whole, calls = counted
        run = tmp_path / "run"
        log = tmp_path / "log"
        # judging for a step, not for the evaluation in the middle; the first checkpoint, not the
        # last
        share = {"judging": 0.4, "saving": 0.1}.get(area, 0.5)
        moment = {"area": area, "calls": int(share * calls[area]), "signals": [(0, signum)]}
        ended, _ = fork_server.run(*train_command(run), output=log, **moment)
        printed = log.read_text()
        assert ended == code, printed
        name = signal.Signals(signum).name
        assert f"{name}: saving, then stopping; Ctrl-C now ends at once" in printed
        assert printed.endswith(f"stopped by {name}\n")
        # on a busy machine the signal may come later, also in an evaluation: then its step is saved
        # and not yet logged
        checkpoint = RunDirectory(run).checkpoints.folder / saved_steps(run)[-1]
        done = int(checkpoint.name.removeprefix("step_"))
        pending = read_state(checkpoint).get("pending_metrics")
        assert f"saved: step {done} of 4; continue with: dapo resume {run}\n" in printed
        assert metrics(run)[-1]["step"] == (done if pending is None else done - 1)
        summary = json.loads((run / "summary.json").read_text())
        assert summary["exit_reason"] == f"interrupted: stopped by {name}"
        kept = sum(
            row["rollout/tokens_generated"]
            for row in [*metrics(run)[1:], *([pending] if pending else [])]
        )
        assert summary["tokens_generated"] - summary["tokens_discarded"] == kept
        assert summary["tokens_discarded"] > 0 or area in ("update", "saving")
        assert summary["wall_s"] > 0
        assert "Traceback" not in printed
        assert_ends_like(run, whole)

    def test_a_second_ctrl_c_ends_at_once(
        self, fork_server: ForkServer, counted: tuple[Path, dict[str, int]], tmp_path: Path
    ):
        whole, calls = counted
        run = tmp_path / "run"
        log = tmp_path / "log"
        # time for both, on any machine
        moment = {"area": "update", "calls": calls["update"] // 2, "hold": 60}
        code, _ = fork_server.run(
            *train_command(run),
            output=log,
            signals=[(0, signal.SIGINT), (1, signal.SIGINT)],
            **moment,
        )
        assert code == -signal.SIGINT
        assert "saving, then stopping; Ctrl-C now ends at once" in log.read_text()
        assert "saved: " not in log.read_text()
        assert_ends_like(run, whole)

    def test_a_request_is_seen_at_the_next_poll(self):
        request = StopRequest()
        request.check()
        request.signum = signal.SIGTERM
        with pytest.raises(Interrupted, match=r"^stopped by SIGTERM$") as error:
            request.check()
        assert error.value.exit_code == 143


@pytest.mark.skipif(sys.platform != "linux", reason="stopped processes are recognised on Linux")
def test_verifier_processes_that_are_killed_or_stopped_leave_the_run_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    disturbances = [
        kill_worker,
        stop_worker,
        kill_supervisor,
        stop_and_continue_both,
        kill_both,
        stop_both,
    ]
    signals = tmp_path / "signals"  # the same in both runs: evaluations hold the verifier's options
    verifier = "reward.verifier=helpers.reward_functions:waits_for_a_signal"
    options = f"reward.options={{folder: {signals}, every: 9}}"
    config = tiny(*STEPS, verifier, options, "reward.workers=2", "reward.timeout_s=1")
    for name, planned in (("whole", [go_on]), ("disturbed", disturbances)):
        signals.mkdir()
        with disturbed_verifiers(signals, planned) as happened:
            start_run(config, run_dir=tmp_path / name / "run", config_name="tiny")
        assert len(happened) >= len(planned), happened
        shutil.rmtree(signals)
    assert differences(contents(tmp_path / "disturbed/run"), contents(tmp_path / "whole/run")) == []
    assert "a verifier process was lost" in capsys.readouterr().out


class PartWithOverrides:
    """A part of a run with one method replaced."""

    def __init__(self, inner: Any, **replaced: Callable[..., Any]) -> None:
        self._inner = inner
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TestStepsThatFail:
    def fail_in_update(
        self, path: Path, number: int, config: Config, *, skip: Sequence[int] = ()
    ) -> TrainState:
        """Train until the `number`-th update, counted over all steps, raises; those in `skip` come
        to nothing.
        """
        count = 0
        with new_run(config, path) as training_run:
            policy = training_run.policy

            def update(minibatch: Any, *, step: int) -> dict[str, float]:
                nonlocal count
                count += 1
                if count == number:
                    raise NumericsError("the gradient norm was not finite")
                return (
                    {"optim/skipped": 1.0} if count in skip else policy.update(minibatch, step=step)
                )

            training_run.policy = PartWithOverrides(policy, update=update)  # type: ignore[assignment]
            with pytest.raises(NumericsError):
                train(training_run)
        return training_run.state

    def test_half_a_steps_updates_are_never_saved(
        self, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        run = tmp_path / "run"
        self.fail_in_update(run, 6, tiny(*STEPS))  # the second update of step 3
        printed = capsys.readouterr().out
        assert "step 3 ended between its updates; it is discarded\n" in printed
        assert f"saved: step 2 of 4; continue with: dapo resume {run}\n" in printed
        assert saved_steps(run) == ["step_000002"]
        assert_ends_like(run, whole)

    def test_a_step_whose_first_update_fails_leaves_the_step_before_saved(
        self, whole: Path, tmp_path: Path
    ):
        run = tmp_path / "run"
        self.fail_in_update(run, 7, tiny(*STEPS))  # the first update of step 4; step 3 was not due
        assert saved_steps(run) == ["step_000002", "step_000003"]
        assert_ends_like(run, whole)

    def test_updates_that_were_skipped_change_nothing_so_the_step_before_is_saved(
        self, whole: Path, tmp_path: Path
    ):
        run = tmp_path / "run"
        self.fail_in_update(run, 8, tiny(*STEPS), skip=[7])
        assert saved_steps(run) == ["step_000002", "step_000003"]
        assert_ends_like(run, whole)

    def test_a_step_whose_evaluation_is_interrupted_is_saved_and_evaluated_later(
        self, whole: Path, tmp_path: Path
    ):
        run = tmp_path / "run"
        with new_run(tiny(*STEPS), run) as training_run:
            engine = training_run.sampling.engine

            def submit(requests: Sequence[GenerationRequest]) -> None:
                engine.submit(requests)
                state = training_run.state
                # trained, and not yet evaluated
                if state.step == 3 and state.pending_metrics is not None:
                    training_run.stop.signum = signal.SIGTERM

            training_run.sampling.engine = PartWithOverrides(engine, submit=submit)  # type: ignore[assignment]
            with pytest.raises(Interrupted):
                train(training_run)
        assert [row["step"] for row in metrics(run)] == [0, 1, 2]
        assert saved_steps(run) == ["step_000002", "step_000003"]
        resume_run(run, ["train.num_steps=3"])  # writes step 3 again, now whole
        assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3]
        resume_run(run, ["train.num_steps=4"])  # an option that a resume changes lasts
        assert_ends_like(run, whole)

    def test_an_error_before_anything_was_done_saves_nothing_and_resumes_from_the_beginning(
        self, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        run = tmp_path / "run"
        config = tiny(*STEPS)

        def gone(*args: object) -> None:
            raise RewardError("the verifier is gone")

        with new_run(config, run) as training_run:
            training_run.sampling.judge = PartWithOverrides(
                training_run.sampling.judge, submit=gone
            )  # type: ignore[assignment]
            with pytest.raises(RewardError):
                train(training_run)
        assert (
            f"nothing is saved yet; continue with: dapo resume {run}\n" in capsys.readouterr().out
        )
        assert_ends_like(run, whole)

    def test_a_run_that_starves_in_its_first_step_does_not_repeat_the_first_evaluation(
        self, tmp_path: Path
    ):
        run = tmp_path / "run"
        impossible = tiny(
            "reward.verifier=exact", "train.num_steps=1", "dynamic_sampling.max_groups_per_step=4"
        )
        for _ in range(2):
            with pytest.raises(
                DapoError, match="step 1: nothing to learn from, in 4 groups: 4 all wrong"
            ):
                (
                    resume_run(run, [])
                    if run.exists()
                    else start_run(impossible, run_dir=run, config_name="tiny")
                )
            assert saved_steps(run) == ["step_000000"]
            assert [row["step"] for row in metrics(run)] == [0]


class TestFullDisks:
    @pytest.fixture
    def begun(self, finished: Path, tmp_path: Path) -> Path:
        """A run with a checkpoint of step 2."""
        return Path(shutil.copytree(finished, tmp_path / "run"))

    def test_a_run_that_cannot_save_goes_on_for_five_attempts_and_then_stops(
        self, fork_server: ForkServer, begun: Path, tmp_path: Path
    ):
        """No file may grow over 60,000 bytes: weights and moments do, metrics and rollouts do
        not.
        """
        log = tmp_path / "log"
        before = contents(begun, checkpoints="step_000002")
        code, _ = fork_server.run(
            "resume", str(begun), "train.num_steps=20", output=log, file_bytes=60_000
        )
        printed = log.read_text()
        assert code == 1, printed
        assert "the checkpoint of step 4 could not be written" in printed
        assert "File too large" in printed
        assert "training continues, attempt 2 of 5 follows" in printed
        assert "the checkpoint of step 2 is kept; that was attempt 5 in a row" in printed
        assert f"saved: step 2 of 20; continue with: dapo resume {begun}\n" in printed
        assert "Traceback" not in printed
        # a step or two go on while a checkpoint is written
        assert 8 <= metrics(begun)[-1]["step"] <= 14
        assert saved_steps(begun) == ["step_000002"]
        after = contents(begun, checkpoints="step_000002")
        assert after["states"] == before["states"]
        assert before["files"].items() <= after["files"].items()

    def test_on_a_full_disk_the_run_stops_with_an_error_and_continues_once_there_is_room(
        self, begun: Path, tmp_path: Path, small_disk: Path
    ):
        run = small_disk / "run"
        roomy = tmp_path / "roomy"
        shutil.copytree(begun, roomy)
        shutil.move(begun, run)
        ballast = small_disk / "ballast"
        fill(ballast)
        with pytest.raises(
            StorageError, match=r"\(No space left on device: .*free space there"
        ) as error:
            resume_run(run, ["train.num_steps=4"])
        assert error.value.exit_code == 1
        assert "step_000002" in saved_steps(run)
        ballast.unlink()
        for each in (run, roomy):
            resume_run(each, ["train.num_steps=4"])
        assert differences(contents(run, checkpoints=LAST), contents(roomy, checkpoints=LAST)) == []

    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        disk = tmp_path / "disk"
        disk.mkdir()
        mounted = shutil.which("mount") and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)],
            capture_output=True,
            check=False,
        )
        if not mounted or mounted.returncode:
            pytest.skip("a small disk is made with mount, which takes root")
        yield disk
        subprocess.run(["umount", str(disk)], check=True)

    def test_on_a_read_only_disk_the_run_says_so_and_its_checkpoint_stays(
        self, begun: Path, small_disk: Path
    ):
        run = small_disk / "run"
        shutil.move(begun, run)
        before = contents(run)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(
            StorageError, match=r"Read-only file system: .*make it writable"
        ) as error:
            resume_run(run, ["train.num_steps=4"])
        assert error.value.exit_code == 1
        assert contents(run) == before

    def test_a_line_of_metrics_is_whole_or_absent(self, small_disk: Path):
        path = small_disk / "metrics.jsonl"
        sink = JsonlSink(path)
        with pytest.raises(OSError, match="No space left") as error:
            log_for_ever(sink)
        assert error.value.filename == str(path)
        sink.close()
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert path.read_bytes().endswith(b"\n")
        assert steps == list(range(len(steps)))
        assert len(steps) > 1000


def fill(path: Path) -> None:
    """Leave no room on its disk."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def log_for_ever(sink: JsonlSink) -> None:
    for step in itertools.count():
        sink.log(step, {"a": 1.0 + step, "b" * 1000: 2.0})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    run = tmp_path_factory.mktemp("finished") / "run"
    start_run(tiny(*STEPS, "train.num_steps=2", "data.eval=null"), run_dir=run, config_name="tiny")
    return run


class TestMessagesOnResuming:
    @pytest.fixture
    def run(self, finished: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(finished, tmp_path / "run"))

    def test_a_finished_run_says_how_to_train_on(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ):
        before = contents(run)
        resume_run(run, [])
        assert capsys.readouterr().out.endswith(
            f"already at step 2 of 2; to train on: dapo resume {run} train.num_steps=4\n"
        )
        assert contents(run) == before

    def test_checkpoints_that_are_gone_are_missed_and_the_metrics_stay(self, run: Path):
        shutil.rmtree(run / "checkpoints")
        metrics_before = (run / "metrics.jsonl").read_bytes()
        with pytest.raises(
            CheckpointError, match="holds no checkpoint, though the run has saved some"
        ) as error:
            resume_run(run, ["train.num_steps=4"])
        assert error.value.exit_code == 2
        assert (run / "metrics.jsonl").read_bytes() == metrics_before

    @pytest.mark.parametrize(("keep", "first"), [(None, 1), (0, 1), (1, 2)])
    def test_metrics_that_are_gone_are_named_and_the_run_goes_on(
        self, run: Path, capsys: pytest.CaptureFixture[str], keep: int | None, first: int
    ):
        path = run / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.unlink() if keep is None else path.write_bytes(b"".join(lines[:keep]))
        resume_run(run, ["train.num_steps=3"])
        message = (
            f"warning: {path} has no line for {3 - first} of the steps 1 to 2, the first is {first}"
        )
        assert message in capsys.readouterr().err
        assert metrics(run)[-1]["step"] == 3

    def test_what_the_bytes_depend_on_is_named_if_it_has_changed(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ):
        resume_run(run, ["train.num_steps=3"])
        assert "warning" not in capsys.readouterr().out
        other = ("train.seed=5", "data.train={builtin: {sums: {}}, size: 64, seed: 7}")
        resume_run(run, [*other, "train.num_steps=4"])
        printed = capsys.readouterr().out
        for line in (
            (
                "warning: train.seed was 0 up to step 3 and is 5 now; from here on, results belong"
                " to a different run"
            ),
            (
                "warning: data.train.seed was 1 up to step 3 and is 7 now; from here on, results"
                " belong to a different run"
            ),
            "warning: training problems was 64 with checksum ",
        ):
            assert line in printed
        resume_run(run, ["train.num_steps=5"])  # the options of the resume before last
        assert "warning" not in capsys.readouterr().out
        resume_run(run, ["train.seed=0", "train.num_steps=6"])
        assert "warning: train.seed was 5 up to step 5 and is 0 now" in capsys.readouterr().out

    def test_another_version_of_a_package_is_named(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ):
        directory = RunDirectory(run)
        (checkpoint,) = directory.checkpoints.folder.iterdir()
        before = json.loads((checkpoint / "provenance.json").read_text())

        def write(folder: Path) -> None:
            shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
            (folder / "manifest.json").unlink()
            (folder / "provenance.json").write_text(
                json.dumps(before | {"versions": {**before["versions"], "torch": "1.0"}})
            )

        directory.checkpoints.save(2, write, keep=1)
        resume_run(run, ["train.num_steps=3"])
        now = before["versions"]["torch"]
        message = (
            f"warning: torch was 1.0 up to step 2 and is {now} now; from here on, results may differ"
            " by rounding"
        )
        assert message in capsys.readouterr().out


class TestStartsThatAreKilled:
    def test_what_is_left_of_a_start_may_be_started_again(self, tmp_path: Path):
        for name in ("lock", "manifest.json", ".config.yaml.tmp"):
            (tmp_path / name).touch()
        run = RunDirectory.create(tmp_path, "seed: 0\n", {"started": str(datetime.now(UTC))})
        assert run.config.read_text() == "seed: 0\n"
