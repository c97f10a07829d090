"""Binds processes that exchange tensors on one machine to the loopback interface."""

import os
import socket

INTERFACES = ("lo", "lo0")


def use_loopback_interface(*libraries: str) -> None:
    """Have `GLOO` or `NCCL` listen on the loopback interface, unless its variables are set."""
    names = [name for _, name in socket.if_nameindex() if name in INTERFACES]
    if not names:
        return
    for library in libraries:
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", names[0])
