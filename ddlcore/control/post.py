"""Join the coordinator's answers of one turn of the server's loop, so that each rank gets one message instead of many.

When hundreds of ranks send requests at once, the coordinator has hundreds of answers for each of these ranks. If the
answers for a rank are joined, one message and one encryption are enough for this rank.
"""

from __future__ import annotations

from ddlcore.messages.coding import encode
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_rank import Answer, FromCoordinator, Outgoing


def packed(outgoing: Outgoing[LaunchedRank]) -> list[tuple[LaunchedRank, bytes]]:
    """Join the answers in ``outgoing`` as ``joined`` does, and return each rank's messages as encoded bytes.

    A message that many ranks get is encoded only once.
    """
    once: dict[int, bytes] = {}  # by identity, which is safe: ``messages`` keeps the objects alive
    messages = joined(outgoing)
    for _, message in messages:
        if id(message) not in once:
            once[id(message)] = encode(message)
    return [(rank, once[id(message)]) for rank, message in messages]


def joined(outgoing: Outgoing[LaunchedRank]) -> Outgoing[LaunchedRank]:
    """Return the messages of ``outgoing``, with consecutive answers to the same rank joined into one answer.

    The messages to one rank keep their order. Messages to different ranks may change their order. Ranks that shared
    message objects in ``outgoing`` also share them in the result, so that ``packed`` encodes each object only once.
    """
    said: dict[LaunchedRank, list[FromCoordinator]] = {}
    for rank, message in outgoing:
        said.setdefault(rank, []).append(message)
    made: dict[tuple[int, ...], list[FromCoordinator]] = {}
    result: Outgoing[LaunchedRank] = []
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
    """Return whether ``message`` can be joined with ``answers`` into one answer.

    They can be joined if all have the same epoch and at most one of them acknowledges a request (has a serial number).
    """
    return message.epoch == answers[0].epoch and not (message.serial and any(one.serial for one in answers))


def _one(answers: list[Answer]) -> list[FromCoordinator]:
    if len(answers) < 2:
        return list(answers)
    items = tuple(item for one in answers for item in one.items)
    return [Answer(answers[0].epoch, max(one.serial for one in answers), items)]
