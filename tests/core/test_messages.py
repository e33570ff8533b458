"""Records of the control network: text that is no UTF-8 does not stop them."""

from __future__ import annotations

import pytest

from ddlcore.launch.agents import wire
from ddlcore.messages.coding import decode_to_coordinator, encode
from ddlcore.messages.spec import Ask
from ddlcore.messages.to_coordinator import Bye, Request


def test_what_an_error_says_arrives_whatever_it_holds() -> None:
    """Half of a surrogate pair, as in a path that is no UTF-8, becomes a backslash escape."""
    told = decode_to_coordinator(encode(Bye("raised OSError: /data/\udcff is not there")))
    assert told == Bye("raised OSError: /data/\\udcff is not there")
    said = wire.decode_from_agent(wire.encode(wire.Said("lost \ud800")))
    assert said == wire.Said("lost \\ud800")


def test_names_do_not_change_on_the_way() -> None:
    """They are compared with what the rank has: such a request raises."""
    with pytest.raises(UnicodeEncodeError):
        encode(Request(0, 1, (Ask(0, "\ud800", b""),)))
