"""Keeps processes that exchange tensors on one machine out of the reach of others."""

import os
import socket

INTERFACES = ("lo", "lo0")


def use_loopback_interface() -> None:
    """Have gloo and NCCL, which listen for the other ranks, do that where no other machine can reach them.

    What the environment says already counts more.
    """
    names = [name for _, name in socket.if_nameindex() if name in INTERFACES]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if names else ():
        os.environ.setdefault(variable, names[0])
