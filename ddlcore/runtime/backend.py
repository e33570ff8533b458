"""Parses the value of ``--backend``. This module does not know which transports exist, or which ranks can use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddlcore.types import Kind

AUTO = "auto"
SOLO = "solo"  # for devices: a process set of one rank, which needs no transport but the queue
STAGED_ON_HOST = "cpu"  # for devices: what the user writes to ask for staging on the host
ROUTED = (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER, Kind.BARRIER)
_KINDS = {kind.name.lower(): kind for kind in ROUTED}
_FORMS = "auto, NAME, LOCAL+CROSS, or one of them followed by KIND=… such as auto,allgather=NAME"


@dataclass(frozen=True)
class TransportChoice:
    """A choice of transports: ``auto``, one transport's name, or two names.

    Of two names, the first is the transport within a host, and the second the transport across hosts.
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        return "+".join(self.names)


@dataclass(frozen=True)
class Backend:
    """The transports that the user wants for each kind of operation."""

    default: TransportChoice
    kinds: Mapping[Kind, TransportChoice] = field(
        default_factory=dict
    )  # the kinds that use another transport than the default


def parse_backend(text: str) -> Backend:
    """Parse ``text``, the value of ``--backend``, and return the choices of transports in it.

    ``text`` begins with ``auto``, ``NAME`` or ``LOCAL+CROSS``. Other choices for some kinds of operations may follow,
    as in ``auto,allgather=NAME``. Raises ValueError, with a message of one line, if ``text`` is invalid.
    """
    first, *rest = (part.strip() for part in text.split(","))
    if "=" in first:
        raise ValueError(f"backend {text!r}: what serves all other kinds comes first, such as auto,{first}")
    default = _choice(first, text)
    kinds: dict[Kind, TransportChoice] = {}
    for part in rest:
        name, is_pair, value = (piece.strip() for piece in part.partition("="))
        if not is_pair:
            raise ValueError(f"backend {text!r}: {part!r} is not of the form KIND=NAME")
        kind = _KINDS.get(name)
        if kind is None:
            raise ValueError(f"backend {text!r}: {name!r} is no kind of operation; there are {', '.join(_KINDS)}")
        if kind in kinds:
            raise ValueError(f"backend {text!r}: {name} is there twice")
        kinds[kind] = _choice(value, text)
    return Backend(default, kinds)


def _choice(part: str, text: str) -> TransportChoice:
    names = tuple(name.strip() for name in part.split("+"))
    if "" in names:
        raise ValueError(f"backend {text!r}: a name is missing; it is {_FORMS}")
    if len(names) > 2:
        raise ValueError(f"backend {text!r}: {part} has {len(names)} parts; one serves within a host, one across")
    if len(names) == 2 and AUTO in names:
        raise ValueError(f"backend {text!r}: auto composes by itself; name both parts of {part}, or say auto alone")
    return TransportChoice(names)
