"""A run in a hostile place: nobody else can reach its processes, and nothing of the current
directory runs unasked.
"""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

import dapo
from helpers.paths import TINY
from helpers.processes import wait_until
from helpers.sockets import descendants, is_private, listeners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

MODULES = (
    "json",
    "logging",
    "random",
    "typing",
    "subprocess",
    "tempfile",
    "uuid",
    "decimal",
    "statistics",
    "glob",
    "multiprocessing",
    "signal",
    "secrets",
    "shutil",
    "socket",
    "queue",
    "pickle",
    "select",
    "ctypes",
    "numpy",
    "torch",
    "transformers",
    "safetensors",
    "pyarrow",
    "rich",
    "yaml",
    "omegaconf",
    "pydantic",
    "typer",
)
"""What the current directory holds a file of, each of which must not run."""

REWARD = """
import queue, time
from pathlib import Path
import beside_it

def judge(problem, response):
    Path("judging").touch()
    deadline = time.monotonic() + 240
    while not Path("go on").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return response.count("1") > beside_it.NONE
"""

STRANGERS_MESSAGES = (b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096)
ANSWER_S = 0.3


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    for name in MODULES:
        text = (
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name + chr(10)!r})\nraise RuntimeError('a"
            " file that runs')\n"
        )
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "beside_it.py").write_text("NONE = 0\n")
    return tmp_path


def test_a_run_of_many_processes_cannot_be_reached_and_runs_no_file_of_the_current_directory(
    hostile_folder: Path,
):
    overrides = [
        "distributed.trainer_ranks=2",
        "rollout.engines=1",
        "train.num_steps=1",
        "train.threads=1",
    ]
    overrides += [
        "reward.verifier=my_rewards:judge",
        "reward.timeout_s=250",
        "dynamic_sampling.enabled=false",
    ]
    command = [
        sys.executable,
        "-m",
        "dapo",
        "train",
        str(TINY),
        "--run-dir",
        "run",
        "data.eval=null",
        *overrides,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(dapo.__file__).parents[1])}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    with open(hostile_folder / "output", "wb") as output:
        options = {
            "cwd": hostile_folder,
            "env": environment,
            "stdout": output,
            "stderr": output,
            "umask": 0o022,
        }
        run: subprocess.Popen[bytes] = subprocess.Popen(command, **options)  # type: ignore[call-overload]
    try:
        judging = hostile_folder / "judging"
        wait_until(
            lambda: judging.exists() or run.poll() is not None,
            timeout_s=240,
            what="a verdict is asked for",
        )
        found = listeners(descendants(run.pid))
        reachable = [(listener.address, listener.port) for listener in found if listener.port]
        with ThreadPoolExecutor(32) as threads:
            answers = list(
                threads.map(answer_to, *zip(*product(reachable, STRANGERS_MESSAGES), strict=True))
            )
        (hostile_folder / "go on").touch()
        assert run.wait(240) == 0, (hostile_folder / "output").read_text()
    finally:
        for pid in descendants(run.pid) if run.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        run.wait()
    assert len({listener.pid for listener in found}) >= 2, "the trainer ranks listen for each other"
    assert [listener for listener in found if not is_private(listener)] == []
    assert set(answers) == {b""}
    assert not (hostile_folder / "ran").exists(), (hostile_folder / "ran").read_text()
    run_dir = hostile_folder / "run"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in run_dir.rglob("*")}
    private = {
        path
        for name in ("code", "data", "logs")
        for path in (run_dir / name, *(run_dir / name).rglob("*"))
    }
    usual = {path: 0o755 if path.is_dir() else 0o644 for path in modes}
    expected = {path: mode & 0o700 if path in private else mode for path, mode in usual.items()}
    assert {path: mode for path, mode in modes.items() if mode != expected[path]} == {}
    assert (
        json.loads((hostile_folder / "run" / "summary.json").read_text())["exit_reason"]
        == "finished"
    )


def answer_to(address: tuple[str, int], message: bytes) -> bytes:
    """What a stranger is answered."""
    with socket.create_connection(address, timeout=ANSWER_S) as connection:
        try:
            connection.sendall(message)
            return connection.recv(1 << 16)
        except OSError:  # closed, or no answer in time
            return b""


def test_a_listener_on_every_interface_is_found_and_not_private(tmp_path: Path):
    os.chmod(tmp_path, 0o700)
    with (
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        socket.create_server(("127.0.0.1", 0)) as here,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as in_folder,
    ):
        abstract.bind("\0of-this-test")
        in_folder.bind(str(tmp_path / "s"))
        for unix in (abstract, in_folder):
            unix.listen()
        found = {(one.address, one.port): is_private(one) for one in listeners({os.getpid()})}
        assert found["0.0.0.0", everywhere.getsockname()[1]] is False
        assert found["127.0.0.1", here.getsockname()[1]] is True
        assert found["@of-this-test", 0] is False
        assert found[str(tmp_path / "s"), 0] is True
        os.chmod(tmp_path, 0o755)
        if not any(folder.stat().st_mode & 0o077 == 0 for folder in tmp_path.parents):
            assert not is_private(
                next(one for one in listeners({os.getpid()}) if one.address == str(tmp_path / "s"))
            )
