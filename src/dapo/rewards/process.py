"""One worker process seen from the pool: started, asked with a clock, stopped with everything it has started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dapo.errors import RewardError
from dapo.rewards.combine import RewardSpec, Scope
from dapo.rewards.wire import encode, receive

_EXIT_S = 2.0
_STDERR = 2
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerLost(Exception):
    """The worker gave no answer and is gone; the text says why."""


def start_order(spec: RewardSpec) -> bytes:
    """What a worker is told first: what to build, and where this process finds its modules. Raises RewardError."""
    for name in spec.weights:
        if name.startswith("__main__:"):
            raise RewardError(f"{name!r}: what the running script or notebook defines stays there; put it in a module")
    try:
        return encode({"spec": spec.as_json(), "path": [entry for entry in sys.path if entry]})
    except (TypeError, ValueError) as error:
        raise RewardError(f"a verifier's options must be JSON values to reach its processes: {error}") from None


class WorkerProcess:
    """A process of its own session, never forked from this one, spoken to over a socket pair.

    Its standard output goes to this process's standard error: what a user's function prints is seen and corrupts
    nothing. One thread asks; any thread may `interrupt`.
    """

    def __init__(self, order: bytes) -> None:
        """Start it on a `start_order`; `wait_ready` says whether it works."""
        self._lock = threading.Lock()
        self._reaped = False
        self._connection, theirs = socket.socketpair()
        their_lifeline, self._lifeline = os.pipe()
        given = (theirs.fileno(), their_lifeline)
        try:
            self._process = subprocess.Popen(
                # -P: a file of the current directory called random.py must not stop the worker from starting
                [sys.executable, "-P", "-m", "dapo.rewards.worker", *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=given,
                start_new_session=True,
                env=_environment(),
            )
        except OSError:
            self._connection.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(their_lifeline)
        self._order = order
        self.busy = True
        """Starting or judging."""
        self.scopes: Mapping[Scope, Sequence[int]] = {}
        """Which verifiers see a response and which a group, by their place; known once it is ready."""

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Until it can judge. Raises RewardError if its verifier cannot be built, WorkerLost if it is gone."""
        words = self._exchange(self._order, timeout_s, "the worker process was not ready after")
        if "scopes" not in words:
            raise RewardError(words.get("error", "the worker process started with nonsense"))
        self.scopes = words["scopes"]

    def ask(self, request: bytes, timeout_s: float) -> Mapping[str, Any]:
        """The answer to an encoded message. Raises WorkerLost; the process is then gone."""
        return self._exchange(request, timeout_s, "timed out after")

    def _exchange(self, request: bytes, timeout_s: float, late: str) -> Mapping[str, Any]:
        self.busy = True
        deadline = time.monotonic() + timeout_s
        reason = None
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(request)
            answer = receive(self._connection, deadline)
            if answer is not None:
                return answer
        except TimeoutError:
            reason = f"{late} {timeout_s:g} s"
        except ValueError as error:
            reason = f"the worker process answered nonsense ({error})"
        except OSError:
            pass  # it closed its end while we wrote: how it ended says more
        finally:
            self.busy = False
        reason = reason or self._how_it_ended()
        self.stop(graceful=False)
        raise WorkerLost(reason)

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_EXIT_S)
            if code >= 0:
                return f"the worker process exited with code {code}"
            hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
            return f"the worker process was killed by {signal.Signals(-code).name}{hint}"
        return "the worker process closed its connection"

    def interrupt(self) -> None:
        """Kill the process and everything in its group; whoever waits for its answer gets WorkerLost."""
        with self._lock:
            if not self._reaped:
                self._kill()

    def stop(self, *, graceful: bool = True) -> None:
        """End it and free everything; gracefully means that exit handlers get a moment to run."""
        self._connection.close()
        if graceful:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
        with self._lock:
            if not self._reaped:
                self._kill()
                self._process.wait()
                os.close(self._lifeline)
                self._reaped = True

    def _kill(self) -> None:
        # macOS answers PermissionError for a group whose leader has ended
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    # a fixed hash seed, so that what iterates over sets gives the same verdict in every worker and every run
    return {"PYTHONHASHSEED": "0", **os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
