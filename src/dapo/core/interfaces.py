"""Chooses the network interface through which processes exchange tensors."""

import fcntl
import os
import socket
import struct

LOOPBACK_INTERFACES = ("lo", "lo0")
_SIOCGIFADDR = 0x8915
"""Asks Linux for the IPv4 address of an interface (netdevice(7))."""


def use_loopback_interface(*libraries: str) -> None:
    """Have `GLOO` or `NCCL` listen on the loopback interface, unless its variables are set."""
    names = [name for _, name in socket.if_nameindex() if name in LOOPBACK_INTERFACES]
    if names:
        _use(names[0], libraries)


def use_interface_towards(host: str, port: int, *libraries: str) -> str | None:
    """Have `GLOO` or `NCCL` use the interface that leads to a host, unless its variables are set.

    By itself gloo takes the address of the machine's host name, which Debian and Ubuntu map to
    127.0.1.1: ranks of other machines would then connect to themselves.

    Returns the name of the interface; None if it cannot be found, and nothing was set.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
            own_address = str(probe.getsockname()[0])
        except OSError:  # no route
            return None
    name = interface_of(own_address)
    if name is not None:
        _use(name, libraries)
    return name


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address of this machine, if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _use(name: str, libraries: tuple[str, ...]) -> None:
    for library in libraries:
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)
