"""A Slurm of several nodes on this machine: its daemons, with a configuration of their own in a
temporary folder.
"""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing() -> list[str]:
    """Programs that a cluster takes and that are not installed."""
    return [name for name in DAEMONS if shutil.which(name, path=SEARCH_PATH) is None]


class SlurmCluster:
    """Starts when it is made. Slurm's commands work with `environment`."""

    def __init__(self, nodes: int, cpus: int) -> None:
        # sockets want short paths
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": SEARCH_PATH,
        }
        names = [f"node{number}" for number in range(nodes)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(self._configuration(names, cpus))
        try:
            files = [
                f"--{kind}-file={self.folder}/munge.{kind}"
                for kind in ("key", "pid", "log", "seed")
            ]
            self._start(
                "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files
            )
            self._wait((self.folder / "munge.socket").exists, "munged")
            self._start("slurmctld", "-D")
            for name in names:
                self._start("slurmd", "-D", "-N", name)
            self._wait(lambda: self.node_states() == ["idle"] * nodes, "the nodes")
        except BaseException:
            self.close()
            raise

    def run_command(self, *command: str) -> str:
        """A command of Slurm's; what it prints. Its errors are part of the answer."""
        answer = subprocess.run(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return answer.stdout

    def node_states(self) -> list[str]:
        """`idle`, `alloc`, `comp` and so on."""
        return self.run_command("sinfo", "-h", "-N", "-o", "%t").split()

    def job(self, number: str) -> dict[str, str]:
        """`JobState`, `ExitCode`, `Restarts` and the rest."""
        words = self.run_command("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_job(self, number: str, *states: str, timeout_s: float = 120.0) -> dict[str, str]:
        """Return when it is in one of these states; those that it ends in are an error
        otherwise.
        """
        deadline = time.monotonic() + timeout_s
        while (job := self.job(number)).get("JobState") not in states:
            assert time.monotonic() < deadline, job
            assert job.get("JobState") not in (
                "COMPLETED",
                "FAILED",
                "CANCELLED",
                "TIMEOUT",
                "NODE_FAIL",
            ), job
            time.sleep(0.2)
        return job

    def close(self) -> None:
        """End every daemon, the last one first."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder)

    def logs(self) -> str:
        """What the daemons say, for a failure."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.out"))
        )

    def _start(self, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=SEARCH_PATH)
        assert path is not None
        with open(self.folder / f"{len(self._daemons)}-{program}.out", "wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [path, *arguments], env=self.environment, stdout=output, stderr=output
                )
            )

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come up; ended: {ended}\n{self.logs()}")
            time.sleep(0.2)

    def _configuration(self, names: list[str], cpus: int) -> str:
        host = socket.gethostname().split(".")[0]
        user = getpass.getuser()
        folder = self.folder
        ports = _free_ports(1 + len(names))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
            " RealMemory=1000"
            for name, port in zip(names, ports[1:], strict=True)
        )
        return f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2
KillWait=5
InactiveLimit=0
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def processes_of(path: Path) -> list[str]:
    """Command lines of whatever has this path in its arguments or its environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(path).encode() in text and int(process.name) != os.getpid():
            found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found
