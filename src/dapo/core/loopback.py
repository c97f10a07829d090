"""Binds processes that exchange tensors on one machine to the loopback interface."""

import os
import socket

INTERFACES = ("lo", "lo0")


def use_loopback_interface() -> None:
    """Have gloo and NCCL listen for other ranks on the loopback interface; variables that are set stay."""
    names = [name for _, name in socket.if_nameindex() if name in INTERFACES]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if names else ():
        os.environ.setdefault(variable, names[0])
