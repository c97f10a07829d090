"""The main program of a local worker process: creates one object and answers calls on it.

Usage: `python -m dapo.distributed.worker_main FD`, with the file descriptor of a socket.
"""

import os
import pkgutil
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from operator import methodcaller
from pickle import PicklingError
from typing import Any

from dapo.core.errors import DapoError, WorkerFault
from dapo.core.terminal import print_text
from dapo.distributed.channel import Channel


def main() -> None:
    """Serve until the controller closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    channel = Channel(int(sys.argv[1]))
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, messages), daemon=True).start()
    factory, options = messages.get()
    is_ok, target = try_call(lambda: pkgutil.resolve_name(factory)(**options))
    channel.send((is_ok, None if is_ok else target))
    while is_ok:
        method, arguments, options = messages.get()
        answer = try_call(methodcaller(method, *arguments, **options), target)
        try:
            channel.send(answer)
        except (TypeError, AttributeError, PicklingError) as error:
            channel.send((False, WorkerFault(f"the answer of {method} cannot be sent: {error}")))


def try_call(action: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Return (True, the result), or (False, a picklable error).

    The traceback of an unexpected error goes to the log.
    """
    try:
        return True, action(*arguments)
    except DapoError as error:
        return False, error
    except Exception as error:
        print_text(traceback.format_exc(), file=sys.stderr)
        return False, WorkerFault(f"{type(error).__name__}: {error}")


def _read(channel: Channel, messages: "queue.SimpleQueue[Any]") -> None:
    """Queue messages; end the process, even in the middle of a call, with the controller."""
    try:
        while True:
            messages.put(channel.receive())
    except (EOFError, OSError):
        os._exit(0)
    except Exception:  # a call that cannot be unpickled would never be answered
        print_text(traceback.format_exc(), file=sys.stderr)
        os._exit(1)


if __name__ == "__main__":
    main()
