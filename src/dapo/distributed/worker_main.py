"""The main program of a local worker process: it makes one object and answers calls on it.

Usage: `python -m dapo.distributed.worker_main FD`.
"""

import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pickle import PicklingError
from typing import Any

from dapo.core.errors import DapoError, WorkerFault


def main() -> None:
    """Serve until the controller closes the connection or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's business
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    factory, options = connection.recv()
    threading.Thread(target=_read, args=(connection, calls), daemon=True).start()
    target: Any = None
    while True:
        number, method, arguments, kwargs = (0, None, (), options) if target is None else calls.get()
        if method is None:
            is_ok, value = try_call(make, factory, kwargs)
            if is_ok:
                target, value = value, os.getpid()
        else:
            is_ok, value = try_call(call_method, target, method, arguments, kwargs)
        try:
            connection.send((number, is_ok, value))
        except (TypeError, AttributeError, PicklingError) as error:
            connection.send((number, False, WorkerFault(f"the answer of {method} cannot be sent: {error}")))
        if target is None:
            return  # the object could not be made, and the controller knows why


def make(factory: str, options: Mapping[str, Any]) -> Any:
    """The worker's object."""
    return resolve(factory)(**options)


def resolve(name: str) -> Any:
    """`module:function`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def call_method(target: Any, method: str, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call on it."""
    return getattr(target, method)(*arguments, **kwargs)


def try_call(action: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Whether it went well, and the result or an error that can be sent; a fault's traceback goes to the log."""
    try:
        return True, action(*arguments)
    except DapoError as error:
        return False, error
    except Exception as error:
        traceback.print_exc()
        return False, WorkerFault(f"{type(error).__name__}: {error}")


def _read(connection: "Connection[Any, Any]", calls: "queue.SimpleQueue[Any]") -> None:
    """Queue calls as they come; without a controller there is nothing left to live for, even in the middle of one."""
    try:
        while True:
            calls.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)
    except Exception:  # a call that cannot be read: better no process than one that never answers
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
