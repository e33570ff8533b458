"""Encodes the records of the control network by msgspec, and decodes them."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ddlcore.messages.spec import Spec
from ddlcore.messages.store import StoreReply, StoreRequest
from ddlcore.messages.to_coordinator import Request, ToCoordinator
from ddlcore.messages.to_rank import FromCoordinator

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_to_coordinator: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
_from_coordinator: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)
_store_request: msgspec.msgpack.Decoder[StoreRequest] = msgspec.msgpack.Decoder(StoreRequest)
_store_reply = msgspec.msgpack.Decoder(StoreReply)
_spec = msgspec.msgpack.Decoder(Spec)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:  # msgspec does not convert this error if a tag is not valid UTF-8
        raise msgspec.DecodeError(str(error)) from None


def encode(record: msgspec.Struct) -> bytes:
    """Return the encoded bytes of ``record``, which may be any record of this package.

    A text in ``record`` may contain lone surrogates; an example is an error message with a path that is not UTF-8. Lone
    surrogates are replaced by backslash escapes, except in a Request. In a Request, lone surrogates raise
    UnicodeEncodeError: the names in a Request must not change, because they pair the operations of different ranks.
    """
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        if isinstance(record, Request):
            raise
        return _encoder.encode(encodable(record))


def encodable(value: Any) -> Any:
    """Return a copy of ``value`` (a record or a part of one) in which all text can be encoded as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, msgspec.Struct):
        fields = {name: encodable(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, (tuple, list)):
        return type(value)(map(encodable, value))
    if isinstance(value, dict):
        return {encodable(name): encodable(one) for name, one in value.items()}
    return value


def decode_to_coordinator(data: bytes) -> ToCoordinator:
    """Decode a message from a rank to the coordinator.

    All ``decode_...`` functions raise msgspec.DecodeError if ``data`` cannot be decoded. They raise its
    subclass msgspec.ValidationError if ``data`` can be decoded but is not a message of the expected type.
    """
    return _decode(_to_coordinator, data)


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """Decode a message from the coordinator to a rank."""
    return _decode(_from_coordinator, data)


def decode_store_request(data: bytes) -> StoreRequest:
    """Decode a request from a rank to the store."""
    return _decode(_store_request, data)


def decode_store_reply(data: bytes) -> StoreReply:
    """Decode a reply of the store."""
    return _decode(_store_reply, data)


def decode_spec(data: bytes) -> Spec:
    """Decode the bytes in the field ``spec`` of an Ask."""
    return _decode(_spec, data)
