"""Join the coordinator's answers of one turn, so that each rank gets one message instead of many.

When hundreds of ranks send requests at once, the coordinator has hundreds of answers for each of them. Joined, they
cost each rank only one message and one encryption.
"""

from __future__ import annotations

from ddlcore.control.coordinator_protocol import Outgoing
from ddlcore.messages import Answer, FromCoordinator, encode


def packed(outgoing: Outgoing) -> list[tuple[int, bytes]]:
    """Return ``joined(outgoing)`` in encoded form. A message that many ranks get is encoded only once."""
    once: dict[int, bytes] = {}  # by identity, which is safe: ``messages`` keeps the objects alive
    messages = joined(outgoing)
    for _, message in messages:
        if id(message) not in once:
            once[id(message)] = encode(message)
    return [(rank, once[id(message)]) for rank, message in messages]


def joined(outgoing: Outgoing) -> Outgoing:
    """Return ``outgoing`` with consecutive answers to the same rank joined into one.

    The order of each rank's messages is kept, the order between ranks is not. If many ranks had the same objects as
    messages, they have the same objects in the result, so that ``packed`` encodes these only once.
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
