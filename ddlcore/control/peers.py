"""Find out which user owns the other end of a socket, if that end is on this host."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST = 1  # NLM_F_REQUEST: one socket, found by its addresses, instead of a list of all
_ANY_STATE, _NO_COOKIE = 0xFFFFFFFF, 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_QUESTION = struct.Struct("=BBBBI")  # struct inet_diag_req_v2, up to its socket id
_UID_AT = 64  # in struct inet_diag_msg


def is_ours(uid: int) -> bool:
    """Return whether ``uid`` is the user of this process, or root."""
    return uid in (os.geteuid(), 0)


def local_tcp_uid(connection: socket.socket) -> int:
    """Return the id of the user whose process has the other end of the TCP connection ``connection``.

    Returns -1 if the other end is on another host, or if the system does not provide the user id.
    """
    if not hasattr(socket, "AF_NETLINK"):
        return -1
    try:
        ours, theirs = connection.getsockname(), connection.getpeername()
        source, target = _packed(theirs[0]), _packed(ours[0])
        family = socket.AF_INET if len(source) == 4 else socket.AF_INET6
        body = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE)
        body += struct.pack(">HH", theirs[1], ours[1]) + source.ljust(16, b"\0") + target.ljust(16, b"\0")
        body += struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
        head = _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(0.1)
            kernel.sendto(head + body, (0, 0))
            answer = kernel.recv(4096)
    except (OSError, ValueError):
        return -1
    at = _HEADER.size + _UID_AT
    if len(answer) < at + 4 or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:  # an error: no such socket here
        return -1
    return int(struct.unpack_from("=I", answer, at)[0])


def _packed(address: str) -> bytes:
    known = ipaddress.ip_address(address.partition("%")[0])
    mapped = known.ipv4_mapped if isinstance(known, ipaddress.IPv6Address) else None
    return (mapped or known).packed
