"""Join the coordinator's messages of one turn, so that each rank gets one message where several would say the same.

When hundreds of ranks send requests at once, each of them is due hundreds of answers. Joined, these cost one message
and one encryption.
"""

from __future__ import annotations

from ddlcore.control.coordinator_protocol import Outgoing
from ddlcore.messages import Answer, FromCoordinator, encode


def packed(outgoing: Outgoing) -> list[tuple[int, bytes]]:
    """Return ``joined(outgoing)`` in encoded form. A message to many ranks is encoded once."""
    once: dict[int, bytes] = {}  # by identity, which is safe: ``messages`` keeps the objects alive
    messages = joined(outgoing)
    for _, message in messages:
        if id(message) not in once:
            once[id(message)] = encode(message)
    return [(rank, once[id(message)]) for rank, message in messages]


def joined(outgoing: Outgoing) -> Outgoing:
    """Return the same messages for each rank in the same order, with consecutive answers joined into one.

    The order between ranks is not kept. An answer that was one object for many ranks is still one object.
    """
    said: dict[int, list[FromCoordinator]] = {}
    for rank, message in outgoing:
        said.setdefault(rank, []).append(message)
    made: dict[tuple[int, ...], list[FromCoordinator]] = {}
    result: Outgoing = []
    for rank, messages in said.items():
        key = tuple(map(id, messages))
        if key not in made:
            made[key] = _join(messages)
        result += [(rank, message) for message in made[key]]
    return result


def _join(messages: list[FromCoordinator]) -> list[FromCoordinator]:
    result: list[FromCoordinator] = []
    answers: list[Answer] = []
    for message in messages:
        if not isinstance(message, Answer) or (answers and not _agree(answers, message)):
            result += _one(answers)
            answers = []
        if isinstance(message, Answer):
            answers.append(message)
        else:
            result.append(message)
    return result + _one(answers)


def _agree(answers: list[Answer], message: Answer) -> bool:
    """Return whether ``message`` can be joined with ``answers``.

    An answer has only one epoch and acknowledges only one request.
    """
    return message.epoch == answers[0].epoch and not (message.serial and any(one.serial for one in answers))


def _one(answers: list[Answer]) -> list[FromCoordinator]:
    if len(answers) < 2:
        return list(answers)
    items = tuple(item for one in answers for item in one.items)
    return [Answer(answers[0].epoch, max(one.serial for one in answers), items)]
