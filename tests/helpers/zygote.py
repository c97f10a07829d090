"""One process that has imported torch and dapo; the fork servers of all test processes are its forks.

Of four processes of pytest, each would otherwise start two of its own, at seven seconds each. It
starts when the first of them needs it, and ends when the last one that has asked has ended.
"""

import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NoReturn

import dapo
from helpers.paths import ROOT, TESTS

VARIABLE = "DAPO_TEST_ZYGOTE"
"""Of the environment: the name of the socket, which all processes of `pytest -n` share."""
os.environ.setdefault(VARIABLE, f"dapo-zygote-{os.getpid()}-{time.time_ns()}")
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (Path(dapo.__file__).parents[1], TESTS, ROOT))),
    # what a pool sets before Python starts
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}
SERVERS = {"workers": "helpers.forked_workers", "commands": "helpers.fork_server"}
"""The module whose `serve(CONNECTION)` a fork is, by the name that asks for it."""
IMPORTED_ONCE = (
    *SERVERS.values(),
    "dapo.cli.main",
    "dapo.cli.train",
    "dapo.distributed.engine_specs",
    "dapo.distributed.trainer_worker",
    "dapo.distributed.worker_main",
    "dapo.engines.native.engine",
    "dapo.start.build",
    "dapo.start.evaluate",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "transformers.models.llama.modeling_llama",
    "transformers.models.starcoder2.modeling_starcoder2",
)
REQUEST_BYTES = 2**17


def fork_server(name: str, environment: Mapping[str, str] | None = None) -> socket.socket:
    """Have a server forked, with this environment and in the current folder.

    Returns this end of its connection; it ends when that is closed.
    """
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {"name": name, "environment": dict(environment or {}), "folder": str(Path.cwd())}
    with theirs:
        socket.send_fds(_connection(), [json.dumps(request).encode()], [theirs.fileno()])
    return ours


@cache
def _connection() -> socket.socket:
    """The connection of this process, which keeps the other one alive."""
    address = f"\0{os.environ[VARIABLE]}"  # of no file
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            _start(address)
        else:
            return connection


def release() -> None:
    """Close the connection of this process, which needs no further server."""
    if _connection.cache_info().currsize:
        _connection().close()


def _start(address: str) -> None:
    """Start the process, unless another one of pytest does so at this moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(0.01)
            return
        listener.listen()
        os.set_inheritable(listener.fileno(), True)
        # not of subprocess, which would warn of a process that outlives this one
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "helpers.zygote", str(listener.fileno())],
            ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            ],
        )


def serve(listener: socket.socket) -> None:
    """Fork servers until no process of pytest is connected any more."""
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    gc.freeze()  # the collector of a child would write to every object, and so copy its page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the servers
    connections = [listener.accept()[0]]
    while connections:
        for ready in select.select([listener, *connections], [], [])[0]:
            if ready is listener:
                connections.append(listener.accept()[0])
                continue
            request, files, _, _ = socket.recv_fds(ready, REQUEST_BYTES, 1)
            if not request:
                connections.remove(ready)
                ready.close()
                continue
            assert threading.active_count() == 1
            if os.fork() == 0:
                for other in (listener, *connections):
                    other.close()
                _be_the_server(json.loads(request), socket.socket(fileno=files[0]))
            os.close(files[0])


def _be_the_server(request: Mapping[str, object], connection: socket.socket) -> NoReturn:
    """In the fork; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.chdir(str(request["folder"]))
        if environment := request["environment"]:
            os.environ.clear()
            os.environ.update(dict(environment))  # type: ignore[call-overload]
        importlib.import_module(SERVERS[str(request["name"])]).serve(connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
