"""Which addresses are this machine's, and by which of them others see it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Sequence
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR: an interface's IPv4 address, on Linux


def is_here(url: str) -> bool:
    """Whether an engine's address is one of this machine's own: only those can be bound to."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name: it may move
        return False
    if address.is_loopback:
        return True
    kind = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def seen_from(urls: Sequence[str]) -> str:
    """The address by which the machines behind these URLs can reach this one: that of the way to the farthest of them.

    Nothing is sent: connecting a datagram socket only asks the system for the route.
    """
    found = LOOPBACK
    for host in (urlsplit(url).hostname or "" for url in urls):
        own = own_address(host)
        if own and not ipaddress.ip_address(own).is_loopback:
            found = own
    return found


def own_address(peer: str) -> str:
    """This machine's address on the way to `peer`; empty when there is no way."""
    try:
        kind, *_, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The name of the network interface with this IPv4 address; empty when none is known to have it."""
    try:
        import fcntl

        wanted = socket.inet_aton(address)
    except (ImportError, OSError):  # no such calls here, or IPv6
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if answer[20:24] == wanted:
                    return name
    return ""


def free_port(host: str) -> int:
    """One that nobody listened on a moment ago."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])
