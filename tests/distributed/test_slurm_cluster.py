"""`dapo submit` on a real Slurm of two nodes, both of them this machine."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.distributed.slurm.job import Allocation, Job, batch_script
from helpers.paths import TESTS
from helpers.processes import wait_until
from helpers.slurm_cluster import SlurmCluster, missing, processes_of
from helpers.tiny_runs import CONFIGS, contents, differences, metrics

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        bool(missing()),
        reason=f"Slurm is not installed here: no {', '.join(missing())} (slurm-wlm)",
    ),
]

FAKE_SLURM = TESTS / "helpers" / "fake_slurm"
RUN = ["train.threads=1", "train.num_steps=25", "train.save_every=0", "train.eval_every=0"]
RUN += ["dynamic_sampling.enabled=false"]  # the tiny model soon is always right


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(nodes=2, cpus=3)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module", autouse=True)
def job_near_time_limit(
    cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, str]:
    """A job that waits for its time limit of a minute, beside the other tests, with a stand-in for
    dapo.
    """
    folder = tmp_path_factory.mktemp("limit")
    job = Job(
        run_dir=folder / "run",
        config=folder / "run.slurm" / "config.yaml",
        work_dir=folder,
        python=FAKE_SLURM / "python",
        use_ray=False,
        setup=(f"export DAPO=saves FAKE_SLURM_LOG={folder}/calls RUN_DIR={folder}/run",),
    )
    job.folder.mkdir()
    script = job.folder / "job.sh"
    script.write_text(batch_script(job, Allocation(cpus_per_node=1, time="1", stop_before_s=1)))
    return job, cluster.run_command("sbatch", "--parsable", str(script)).strip()


def dapo(cluster: SlurmCluster, *arguments: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-m", "dapo", *arguments],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def submit(cluster: SlurmCluster, run: Path, *arguments: str) -> str:
    output = dapo(cluster, "submit", str(CONFIGS / "tiny.yaml"), *arguments, "--run-dir", str(run))
    return output.split(":")[0].removeprefix("job ")


def steps_of(run: Path) -> int:
    return len(metrics(run)) if (run / "metrics.jsonl").exists() else 0


def output_of(run: Path, number: str) -> str:
    return (run.with_name(f"{run.name}.slurm") / f"{number}.log").read_text()


def test_a_job_signalled_before_its_time_limit_is_requeued_and_ends_like_any_other(
    cluster: SlurmCluster, tmp_path: Path
):
    whole = tmp_path / "whole"
    run = tmp_path / "a run's $HOME 100%j"
    number = submit(cluster, run, *RUN, "--cpus-per-node", "1", "--time", "1:00:00")
    wait_until(lambda: steps_of(run) >= 3, timeout_s=100)
    # what `--signal=B:USR1@120` does at its time
    cluster.run_command("scancel", "--batch", "--signal=USR1", number)
    cluster.wait_for_job(number, "PENDING")
    assert 3 <= steps_of(run) < 26
    wait_until(lambda: cluster.node_states() == ["idle", "idle"], timeout_s=100)
    time.sleep(2)  # a node refuses to start a job in the second in which it has ended it
    cluster.run_command(
        "scontrol", "update", f"JobId={number}", "StartTime=now"
    )  # Slurm lets two minutes pass otherwise
    job = cluster.wait_for_job(number, "COMPLETED")
    assert (job["ExitCode"], job["Restarts"]) == ("0:0", "1")
    assert "the run is saved, and the job is requeued" in output_of(run, number)
    dapo(cluster, "train", str(CONFIGS / "tiny.yaml"), *RUN, "--run-dir", str(whole))
    final = "step_000025"
    assert differences(contents(run, checkpoints=final), contents(whole, checkpoints=final)) == []


def test_two_nodes_train_with_ray_and_leave_nothing_behind(cluster: SlurmCluster, tmp_path: Path):
    run = tmp_path / "run"
    number = submit(
        cluster, run, "train.num_steps=2", "train.threads=1", "--nodes", "2", "--cpus-per-node", "2"
    )
    cluster.wait_for_job(number, "COMPLETED")
    assert steps_of(run) == 3
    assert "launcher: ray" in (run / "config.yaml").read_text()
    assert "starting Ray on 2 nodes: node[0-1]" in output_of(run, number)
    assert "forcing job termination" not in output_of(run, number)
    assert "Killed" not in output_of(run, number)
    assert processes_of(run) == []
    assert not list((tmp_path / "run.slurm").glob("*token*"))


def test_a_job_that_is_stopped_saves_and_a_failing_one_keeps_its_exit_code(
    cluster: SlurmCluster, tmp_path: Path
):
    run = tmp_path / "run"
    number = submit(cluster, run, *RUN, "--cpus-per-node", "1")
    wait_until(lambda: steps_of(run) >= 2, timeout_s=100)
    cluster.run_command("scancel", "--batch", "--signal=TERM", number)
    assert cluster.wait_for_job(number, "FAILED")["ExitCode"] == "143:0"
    assert list((run / "checkpoints").glob("step_*"))
    number = submit(cluster, tmp_path / "other", "model=/no/such/model", "--cpus-per-node", "1")
    assert cluster.wait_for_job(number, "FAILED")["ExitCode"] == "2:0"


def test_slurm_sends_the_signal_before_the_limit_and_the_job_is_in_the_queue_again(
    cluster: SlurmCluster, job_near_time_limit: tuple[Job, str]
):
    job, number = job_near_time_limit
    wait_until(lambda: cluster.job(number)["Restarts"] == "1", timeout_s=100)
    assert cluster.wait_for_job(number, "PENDING")["Requeue"] == "1"
    assert (job.run_dir / "checkpoints" / "step_000001").exists()
    assert "the time limit is near: the run is saved" in output_of(job.run_dir, number)
