"""The sockets on which processes listen, as the kernel lists them."""

import ipaddress
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_LISTENING = 0x0A
_ACCEPTS_CONNECTIONS = 0x10000


class Listener(NamedTuple):
    """A socket that accepts connections from other processes, or datagrams."""

    pid: int
    address: str
    """An IP address, the path of a Unix socket, or its abstract name after `@`."""
    port: int = 0


def descendants(pid: int) -> set[int]:
    """A process and all that it has started, directly or not."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
    found = {pid}
    new = {pid}
    while new := {child for child, parent in parents.items() if parent in new}:
        found |= new
    return found


def listeners(pids: Collection[int]) -> list[Listener]:
    """The sockets of these processes at which others can reach them: TCP, UDP and Unix."""
    owners = dict(_socket_owners(pids))
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for fields in _rows(name):
            host, _, port = fields[1].partition(":")
            if fields[9] in owners and (name.startswith("udp") or int(fields[3], 16) == _LISTENING):
                found.append(Listener(owners[fields[9]], _address(host), int(port, 16)))
    named = [fields for fields in _rows("unix") if fields[6] in owners and len(fields) > 7]
    accepting = [fields for fields in named if int(fields[3], 16) & _ACCEPTS_CONNECTIONS]
    return found + [Listener(owners[fields[6]], fields[7]) for fields in accepting]


def is_private(listener: Listener) -> bool:
    """Whether only this machine can reach it, or, for a Unix socket, only this user."""
    if listener.port:
        address = ipaddress.ip_address(listener.address)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback
    folders = Path(listener.address).parents if listener.address.startswith("/") else ()
    return any(folder.is_dir() and not folder.stat().st_mode & 0o077 for folder in folders)


def _rows(table: str) -> Iterator[list[str]]:
    for line in Path("/proc/net", table).read_text().splitlines()[1:]:
        yield line.split()


def _socket_owners(pids: Collection[int]) -> Iterator[tuple[str, int]]:
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1], pid


def _address(text: str) -> str:
    """The kernel writes an address as 32-bit numbers in the byte order of the machine."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
