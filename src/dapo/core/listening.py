"""Sockets on which a server of this process listens."""

import socket


def open_listener(host: str, port: int) -> socket.socket:
    """Listen at an address.

    Args:
        host: an IP address or a name of this machine.
        port: the port; 0: any free one.

    Raises:
        OSError: the address is unknown, forbidden or taken.
        OverflowError: there is no such port.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener
