"""Two trainer ranks on two machines: network namespaces with a hosts file as Debian writes it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RANK = """
import pickle, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from dapo.distributed.trainer_worker import TrainerWorker
from helpers.tiny_runs import tiny

rank, gate_file = int(sys.argv[1]), Path(sys.argv[2])
worker = TrainerWorker(tiny("distributed.trainer_ranks=2"), rank=rank, threads=1)
if rank == 0:
    unfinished = gate_file.with_suffix(".new")
    unfinished.write_bytes(pickle.dumps(worker.open_gate()))
    unfinished.rename(gate_file)
while not gate_file.exists():
    time.sleep(0.05)
worker.init_process_group(pickle.loads(gate_file.read_bytes()), timeout_s=60)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print("sum", total.item(), flush=True)
"""
HOSTS = "127.0.0.1 localhost\n127.0.1.1 trainer\n"
NAMESPACE = (
    "hostname trainer && mount --bind {hosts} /etc/hosts && ip link set lo up && exec sleep 300"
)


def has_namespaces() -> bool:
    """Whether this user may make a machine of a network, a host name and a hosts file."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    cable = ["ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1"]
    command = ["unshare", "--net", "--mount", "--uts", *cable]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def machines(hosts: Path) -> Iterator[list[int]]:
    """Two machines with a cable between them: process ids whose namespaces are theirs."""
    hosts.write_text(HOSTS)
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", NAMESPACE.format(hosts=hosts)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    try:
        names = [process.pid for process in processes]
        own = Path("/proc/self/ns/net").readlink()
        while any(Path(f"/proc/{pid}/ns/net").readlink() == own for pid in names):
            time.sleep(0.01)
        first, second = map(str, names)
        run(f"ip link add cable0 type veth peer name cable1 netns {second}".split(), inside=first)
        for number, pid in enumerate(names):
            run(f"ip addr add 10.77.0.{number + 1}/24 dev cable{number}".split(), inside=str(pid))
            run(f"ip link set cable{number} up".split(), inside=str(pid))
        for number, pid in enumerate(names):
            run(f"ip route add default via 10.77.0.{2 - number}".split(), inside=str(pid))
        yield names
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(command: list[str], *, inside: str) -> None:
    subprocess.run(["nsenter", "-t", inside, "-n", *command], check=True)


@pytest.mark.skipif(not has_namespaces(), reason="needs root and network namespaces")
def test_ranks_meet_where_the_host_name_is_a_loopback_address(tmp_path: Path) -> None:
    with machines(tmp_path / "hosts") as names:
        ranks = [
            subprocess.Popen(
                [
                    *("nsenter", "-t", str(pid), "-n", "-m", "-u", f"-w{os.getcwd()}"),
                    *(sys.executable, "-c", RANK, str(rank), str(tmp_path / "gate")),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": "tests"},
            )
            for rank, pid in enumerate(names)
        ]
        try:
            outputs = [process.communicate(timeout=120)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    for rank, output in enumerate(outputs):
        assert "sum 3.0" in output, output
        assert f"rank {rank}: tensors go through cable{rank}, by the route to rank 0" in output
