"""`dapo submit`: what it writes, and what its script does, with a few lines of shell as Slurm's
commands (tests/helpers/fake_slurm); tests/distributed/test_slurm_cluster.py has a real Slurm.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dapo.cli.main import main
from dapo.config import dump_config, load_config
from dapo.core.errors import ConfigError
from dapo.distributed.slurm.job import Allocation, Job, batch_script, seconds_of
from helpers import paths
from helpers.paths import TESTS
from helpers.processes import is_alive, wait_until
from helpers.run_files import new_run
from helpers.slurm_cluster import processes_of
from helpers.tables import for_each_row

FAKE_SLURM = TESTS / "helpers" / "fake_slurm"
TINY = str(paths.TINY)


def a_job(tmp_path: Path, *, nodes: int = 1, **changes: object) -> Job:
    values: dict[str, object] = {
        "run_dir": tmp_path / "run",
        "config": tmp_path / "run.slurm" / "config.yaml",
        "work_dir": tmp_path,
        "python": FAKE_SLURM / "python",
        "use_ray": nodes > 1,
        "start_timeout_s": 20.0,
    }
    return Job(**(values | changes))  # type: ignore[arg-type]


@dataclass
class FakeAllocation:
    """A batch script on an allocation that is not one."""

    job: Job
    nodes: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, allocation: Allocation | None = None) -> "subprocess.Popen[str]":
        self.job.folder.mkdir(exist_ok=True)
        script = self.job.folder / "job.sh"
        script.write_text(batch_script(self.job, allocation or Allocation(nodes=self.nodes)))
        slurm = {
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NUM_NODES": str(self.nodes),
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_CPUS_ON_NODE": "1",
            "SLURMD_NODENAME": "node0",
            "FAKE_SLURM_LOG": str(self.log),
            "RUN_DIR": str(self.job.run_dir),
        }
        return subprocess.Popen(
            ["bash", str(script)],
            env={
                **os.environ,
                **slurm,
                **self.environment,
                "PATH": f"{FAKE_SLURM}:{os.environ['PATH']}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *, timeout_s: float = 40.0) -> tuple[int, str]:
        return self._end_of(self.start(), timeout_s)

    def run_and_signal(self, signum: int) -> tuple[int, str]:
        """Send a signal to the shell alone, as `--signal=B:` does, once dapo is at work."""
        ready = self.log.with_name(f"{self.log.name}.ready")
        ready.unlink(missing_ok=True)
        process = self.start()
        wait_until(ready.exists)
        process.send_signal(signum)
        return self._end_of(process, 40.0)

    def _end_of(self, process: "subprocess.Popen[str]", timeout_s: float) -> tuple[int, str]:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return process.returncode, output

    @property
    def log(self) -> Path:
        return self.job.run_dir.with_name("calls.log")

    @property
    def calls(self) -> list[str]:
        """What was started with the interpreter, without the process's number."""
        return [line.split(" ", 1)[1] for line in self.log.read_text().splitlines()]

    @property
    def started(self) -> list[int]:
        return [int(line.split(" ", 1)[0]) for line in self.log.read_text().splitlines()]

    @property
    def is_requeued(self) -> bool:
        return self.log.with_name(f"{self.log.name}.requeued").exists()


# --- what the script says


def test_the_script_asks_slurm_for_what_the_command_line_asks_for(tmp_path: Path):
    allocation = Allocation(
        nodes=4,
        gpus_per_node=8,
        cpus_per_node=96,
        time="2-12:00:00",
        partition="gpu,big",
        account="phys-101",
        stop_before_s=600,
        options=("--qos=high", "--gres=gpu:a100:8"),
    )
    lines = batch_script(a_job(tmp_path, nodes=4), allocation).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=dapo-run",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--gpus-per-node=8",
        "--time=2-12:00:00",
        "--partition=gpu,big",
        "--account=phys-101",
        f'--output="{tmp_path}/run.slurm/%j.log"',
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@600",
        "--qos=high",
        "--gres=gpu:a100:8",
    ]


def test_without_a_number_of_cpus_whole_nodes_are_asked_for(tmp_path: Path):
    lines = batch_script(a_job(tmp_path), Allocation()).splitlines()
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0"} <= set(lines)
    assert not [
        line
        for line in lines
        if line.startswith(("#SBATCH --time", "#SBATCH --gpus", "#SBATCH --cpus"))
    ]


@pytest.mark.parametrize(
    ("time_limit", "seconds"),
    [
        ("90", 5_400),
        ("90:30", 5_430),
        ("12:00:00", 43_200),
        ("2-0", 172_800),
        ("2-12:30", 217_800),
        ("1-00:00:01", 86_401),
        ("0", float("inf")),
        ("UNLIMITED", float("inf")),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(time_limit: str, seconds: float):
    assert seconds_of(time_limit) == seconds


@pytest.mark.parametrize("time_limit", ["", "2h", "1:2:3:4", "2-", "-5", "1.5", "12:00:00 ", "1\n"])
def test_other_times_are_refused_with_the_forms_that_there_are(time_limit: str):
    with pytest.raises(
        ConfigError, match=r"^--time .*: expected MINUTES, .* for example 12:00:00 or 2-0$"
    ):
        seconds_of(time_limit)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": "2"}, "--time 2 ends before the signal that comes 120 s earlier"),
        ({"partition": "a b"}, "--partition 'a b': expected a name"),
        ({"account": "x\n#SBATCH --uid=0"}, "--account"),
        ({"options": ("qos=high",)}, "--sbatch 'qos=high': expected an option of sbatch"),
        ({"options": ("--qos=a\nrm -rf ~",)}, "--sbatch"),
    ],
)
def test_values_that_would_not_be_passed_on_unchanged_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
):
    with pytest.raises(ConfigError) as error:
        batch_script(a_job(tmp_path), Allocation(**changes))  # type: ignore[arg-type]
    assert message in str(error.value)


NASTY = 'it\'s $(touch pwned) "&" `x` 100%j; \\ #1 ünï'


def test_every_value_reaches_dapo_as_it_was_typed(tmp_path: Path):
    folder = tmp_path / NASTY
    folder.mkdir()
    overrides = (f"data.system={NASTY}", "data.instruction=two\nlines", "a=*")
    allocated = FakeAllocation(a_job(folder, overrides=overrides), environment={"DAPO": "0"})
    assert allocated.run() == (0, "")
    words = " ".join(
        ["-m dapo train", str(folder / "run.slurm/config.yaml"), "--run-dir", str(folder / "run")]
    )
    assert allocated.log.read_text().split(" ", 1)[1] == f"{words} {' '.join(overrides)}\n"
    assert not list(tmp_path.rglob("pwned"))


def test_a_percent_sign_in_the_path_is_no_pattern_of_slurms(tmp_path: Path):
    script = batch_script(a_job(tmp_path / "100%j"), Allocation())
    assert f'#SBATCH --output="{tmp_path}/100%%j/run.slurm/%j.log"' in script


def test_a_line_break_in_the_path_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="line break"):
        batch_script(a_job(tmp_path / "a\nb"), Allocation())


# --- what the script does


def test_one_node_trains_without_ray_and_keeps_the_exit_code(tmp_path: Path):
    for code in ("0", "1", "2", "137"):
        allocated = FakeAllocation(a_job(tmp_path), environment={"DAPO": code})
        assert allocated.run()[0] == int(code)
        shutil.rmtree(tmp_path / "run")
    assert {call.split(" --")[0] for call in allocated.calls} == {
        f"-m dapo train {tmp_path}/run.slurm/config.yaml"
    }
    assert not allocated.is_requeued
    assert sorted(path.name for path in (tmp_path / "run.slurm").iterdir()) == ["job.sh"]


def test_a_run_that_is_there_is_continued(tmp_path: Path):
    new_run(tmp_path / "run")
    allocated = FakeAllocation(
        a_job(tmp_path, overrides=("train.num_steps=9",)), environment={"DAPO": "0"}
    )
    assert allocated.run()[0] == 0
    assert allocated.calls == [f"-m dapo resume {tmp_path}/run train.num_steps=9"]


def test_before_the_time_limit_the_run_saves_and_is_requeued_until_it_is_finished(tmp_path: Path):
    allocated = FakeAllocation(a_job(tmp_path), environment={"DAPO": "saves"})
    code, output = allocated.run_and_signal(signal.SIGUSR1)
    assert (code, allocated.is_requeued) == (143, True)
    assert "the run is saved, and the job is requeued" in output
    allocated.environment["DAPO"] = "0"
    assert allocated.run()[0] == 0
    assert [call.split()[2] for call in allocated.calls] == ["train", "resume"]
    assert allocated.log.with_name("calls.log.requeued").read_text() == "17\n"


def test_a_cancelled_run_saves_and_does_not_go_back_to_the_queue(tmp_path: Path):
    allocated = FakeAllocation(a_job(tmp_path), environment={"DAPO": "saves"})
    assert allocated.run_and_signal(signal.SIGTERM)[0] == 143
    assert (tmp_path / "run" / "checkpoints" / "step_000001").exists()
    assert not allocated.is_requeued


def test_a_run_that_finishes_no_step_within_the_limit_is_not_started_for_ever(tmp_path: Path):
    allocated = FakeAllocation(a_job(tmp_path), environment={"DAPO": "hangs"})
    code, output = allocated.run_and_signal(signal.SIGUSR1)
    assert (code, allocated.is_requeued) == (143, False)
    assert "no step was finished within the time limit" in output


def test_several_nodes_get_a_ray_with_a_token_and_nothing_of_it_is_left(tmp_path: Path):
    allocated = FakeAllocation(
        a_job(tmp_path, nodes=3, start_timeout_s=77), nodes=3, environment={"DAPO": "saves"}
    )
    code, output = allocated.run_and_signal(signal.SIGUSR1)
    assert (code, allocated.is_requeued) == (143, True), output
    token, head, *others = allocated.calls
    assert token.startswith("-c")
    temporary = next(word for word in head.split() if word.startswith("--temp-dir=")).removeprefix(
        "--temp-dir="
    )
    assert "--head --port=0" in head
    assert head.endswith("--num-cpus=1 --num-gpus=0")
    workers = [call for call in others if "--address=10.0.0.1:4321" in call]
    assert len(workers) == 2
    train = (
        f"-m dapo train {tmp_path}/run.slurm/config.yaml --run-dir {tmp_path}/run"
        " launcher=ray:10.0.0.1:4321"
    )
    node_wait = next(call for call in others if "wait_for_nodes" in call)
    assert others.index(train) > others.index(node_wait)  # the workers start beside both
    node_wait = node_wait.split()
    assert (node_wait[2:4], 70 < int(node_wait[4]) <= 77) == (["10.0.0.1:4321", "3"], True)
    assert not Path(temporary).exists()
    assert not [pid for pid in allocated.started if is_alive(pid)]
    names = {path.name for path in (tmp_path / "run.slurm").iterdir()}
    assert names == {"job.sh", *(f"17-ray-node{number}.log" for number in range(3))}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RAY_FAILS": "1"}, "Ray did not start; see "),
        ({"WORKER_FAILS": "1", "WAIT_FOR_NODES_EXIT_CODE": "1"}, "see "),
        ({"WAIT_FOR_NODES_EXIT_CODE": "1"}, "Ray is not ready on all nodes; see "),
    ],
)
def test_a_ray_that_does_not_come_is_an_error_with_the_path_of_its_logs(
    tmp_path: Path, environment: dict[str, str], message: str
):
    allocated = FakeAllocation(
        a_job(tmp_path, nodes=2), nodes=2, environment={"DAPO": "0", **environment}
    )
    code, output = allocated.run()
    assert (code, message in output) == (1, True), output
    assert not [call for call in allocated.calls if call.startswith("-m dapo train")]
    assert not [pid for pid in allocated.started if is_alive(pid)]


def test_the_logs_of_ray_are_kept_where_the_run_fails_and_the_token_is_not(tmp_path: Path):
    allocated = FakeAllocation(a_job(tmp_path, nodes=2), nodes=2, environment={"DAPO": "1"})
    assert allocated.run()[0] == 1
    assert len(list((tmp_path / "run.slurm").glob("17-ray-logs-*/gcs_server.out"))) >= 1
    assert not list((tmp_path / "run.slurm").glob("17-token"))
    assert not list((tmp_path / "run.slurm").glob("17-failed"))


def test_what_is_to_be_set_up_runs_first_and_the_job_ends_where_it_fails(tmp_path: Path):
    allocated = FakeAllocation(a_job(tmp_path, setup=("export DAPO=5 # a comment", "true")))
    assert allocated.run()[0] == 5
    allocated = FakeAllocation(a_job(tmp_path, setup=('module load "it\'s-cuda"',)))
    code, output = allocated.run()
    assert (code, 'dapo submit: this failed: module load "it\'s-cuda"' in output) == (1, True)
    assert len(allocated.calls) == 1


@pytest.mark.ray
def test_two_nodes_that_are_this_machine_train_with_a_real_ray_that_is_gone_afterwards(
    tmp_path: Path,
):
    pytest.importorskip("ray")
    job = a_job(tmp_path, nodes=2, python=Path(sys.executable), start_timeout_s=120)
    job.folder.mkdir()
    options = ["train.num_steps=1", "train.threads=1", "train.eval_every=0"]
    job.config.write_text(dump_config(load_config(TINY, options)))
    code, output = FakeAllocation(job, nodes=2).run(timeout_s=200)
    assert code == 0, output
    assert "starting Ray on 2 nodes" in output
    assert len((job.run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    settled = (job.run_dir / "config.yaml").read_text()
    assert re.search(r"launcher: ray:[\d.]+:\d+", settled)
    assert "Address already in use" not in (job.folder / "17-ray-node1.log").read_text()
    assert processes_of(tmp_path) == []


# --- the command


@pytest.fixture
def on_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", f"{FAKE_SLURM}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    out, err = capsys.readouterr()
    return (stopped.value.code if isinstance(stopped.value.code, int) else 0), out, err


def test_submit_writes_script_and_config_next_to_the_run_and_prints_their_paths(
    capsys: pytest.CaptureFixture[str], on_a_cluster: Path
):
    code, out, err = run(
        capsys, "submit", TINY, "train.num_steps=3", "--run-dir", "runs/a", "--time", "1:00:00"
    )
    assert (code, err) == (0, "")
    folder = on_a_cluster / "runs" / "a.slurm"
    assert out.splitlines()[0] == f"job 17: 1 node, run {on_a_cluster}/runs/a"
    assert f"{folder}/17.log" in out
    assert load_config(folder / "config.yaml") == load_config(TINY, ["train.num_steps=3"])
    assert not (on_a_cluster / "runs" / "a").exists()
    script = (folder / "job.sh").read_text()
    assert f"python={shlex.quote(sys.executable)}\n" in script
    assert subprocess.run(["bash", "-n", str(folder / "job.sh")], check=False).returncode == 0

    code, out, err = run(capsys, "submit", TINY, "--run-dir", "runs/a")
    assert (code, out) == (2, "")
    assert f"was submitted already, as job 17; submit it again with `sbatch {folder}/job.sh`" in err


PAPER = str(paths.CONFIGS / "dapo_32b.yaml")
SEVEN = str(paths.CONFIGS / "dapo_7b.yaml")
FULL = (PAPER, "--nodes", "16", "--gpus-per-node", "8")
SIX = (PAPER, "--nodes", "22", "--gpus-per-node", "6")
PAIRS = ("distributed.trainer_ranks=128", "rollout.engines=32")


@for_each_row(
    ["arguments", "words"],
    [
        (
            [PAPER, "--nodes", "16"],
            (
                "distributed.trainer_ranks=64 rollout.engines=16 rollout.vllm.tensor_parallel=4"
                " needs 128 GPUs, and the job requests none; add --gpus-per-node NUMBER, at least 8"
                " for --nodes 16"
            ),
        ),
        (
            [PAPER, "--nodes", "8", "--gpus-per-node", "8"],
            "needs 128 GPUs, and --nodes 8 --gpus-per-node 8 gives 64; request --nodes 16",
        ),
        (
            [PAPER, "--nodes", "64", "--gpus-per-node", "2"],
            "rollout.vllm.tensor_parallel=4: the GPUs of an engine are on one node, and --gpus-per-n",
        ),
        (
            # of six GPUs of a node four are an engine's
            [*SIX, "rollout.engines=16"],
            None,
        ),
        (
            [*SIX, "rollout.engines=23", "distributed.trainer_ranks=30"],
            "--nodes 22 --gpus-per-node 6 has room for 22; set rollout.engines=22",
        ),
        ([*FULL], None),
        ([PAPER, "--nodes", "16", "--sbatch=--gres=gpu:a100:8"], None),
        ([PAPER, "--nodes", "2", "train.device=cpu"], None),
        (
            [*FULL, "distributed.gpus_per_process=0.5", *PAIRS],
            None,
        ),
        (
            [SEVEN, "--gpus-per-node", "4"],
            (
                "distributed.trainer_ranks=8 rollout.engines=8 needs 8 GPUs, and --nodes 1"
                " --gpus-per-node 4 gives 4; request --gpus-per-node 8"
            ),
        ),
        ([SEVEN, "--gpus-per-node", "8"], None),
        # on two nodes ranks and engines do not share, unless an option says so
        ([SEVEN, "--nodes", "2", "--gpus-per-node", "8"], None),
        ([SEVEN, "--nodes", "2", "--gpus-per-node", "4"], "needs 16 GPUs"),
        ([TINY, "--nodes", "3"], None),
    ],
)
def test_what_the_gpus_of_a_job_cannot_place_is_refused_before_it_waits_in_a_queue(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str | None
):
    code, _, err = run(capsys, "submit", *arguments, "--dry-run")
    if words is None:
        assert code == 0, err
    else:
        assert code == 2
        assert words in " ".join(err.split())


def test_gpus_that_a_job_would_leave_idle_are_named(capsys: pytest.CaptureFixture[str]):
    arguments = ["submit", SEVEN, "--nodes", "4", "--gpus-per-node", "8", "--dry-run"]
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["notes"] == [
        "16 of 32 GPUs are used; to use all: distributed.trainer_ranks=32 rollout.engines=32"
        " distributed.gpus_per_process=0.5 (all sample and update in turn), or rollout.engines=24"
    ]
    assert "  note             16 of 32 GPUs are used; " in run(capsys, *arguments)[2]


def test_a_run_is_submitted_to_be_continued_with_other_options(
    capsys: pytest.CaptureFixture[str], on_a_cluster: Path
):
    made = on_a_cluster / "runs" / "a"
    new_run(made)
    code, _, err = run(capsys, "submit", TINY, "--run-dir", str(made))
    assert (code, "already holds a run" in err) == (2, True)
    code, out, err = run(capsys, "submit", str(made), "train.num_steps=9", "--nodes", "2")
    assert (code, err, "job 17: 2 nodes" in out) == (0, "", True)
    script = (on_a_cluster / "runs" / "a.slurm" / "job.sh").read_text()
    assert "\noverrides=(train.num_steps=9)\n" in script
    assert "\nuse_ray=yes\n" in script
    code, out, _ = run(capsys, "submit", str(made), "train.num_steps=9", "--trust", "--dry-run")
    assert (code, "\noverrides=(--trust train.num_steps=9)\n" in out) == (0, True)
    code, _, err = run(capsys, "submit", str(made), "--run-dir", "elsewhere")
    assert (code, "leave --run-dir out" in err) == (2, True)


def test_a_dry_run_prints_the_script_and_needs_no_slurm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = run(
        capsys, "submit", TINY, "--nodes", "2", "--setup", "module load cuda", "--dry-run"
    )
    assert code == 0
    summary = err.splitlines()
    assert summary[0] == "dry run, nothing is written or submitted: 2 nodes"
    folder = re.fullmatch(r"  folder +(\S+[.]slurm), for job[.]sh and its log", summary[2])
    assert folder is not None
    assert summary[3].split() == ["command", "sbatch", f"{folder[1]}/job.sh"]
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=dapo-tiny-")
    assert "\nmodule load cuda\n" in out
    assert not list(tmp_path.iterdir())

    code, out, err = run(capsys, "submit", TINY)
    assert (code, out) == (1, "")
    assert err.startswith("error: sbatch is not on PATH: run dapo submit on a login node")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss.clip_hihg=0.3"], "unknown option loss.clip_hihg; did you mean loss.clip_high=0.3?"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["--time", "two days"], "--time 'two days': expected MINUTES"),
        (["--partition", "a;b"], "--partition 'a;b': expected a name"),
    ],
)
def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(
    capsys: pytest.CaptureFixture[str], on_a_cluster: Path, arguments: list[str], message: str
):
    code, out, err = run(capsys, "submit", TINY, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert not list(on_a_cluster.iterdir())


def test_an_error_of_sbatch_is_shown_and_the_same_command_may_be_tried_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, on_a_cluster: Path
):
    command = ["submit", TINY, "--run-dir", "a"]
    monkeypatch.setenv("SBATCH_REFUSES", "invalid partition specified: gpu")
    code, _, err = run(capsys, *command)
    assert (code, err) == (
        1,
        (
            "error: sbatch refused the job: sbatch: error: invalid partition specified: gpu; the"
            f" script is {on_a_cluster}/a.slurm/job.sh\n"
        ),
    )
    monkeypatch.delenv("SBATCH_REFUSES")
    assert run(capsys, *command)[0] == 0
