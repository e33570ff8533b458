"""Numbers the reductions in a graph of TensorFlow while the graph is traced. All ranks find the same numbers."""

from __future__ import annotations

import re
import threading
import weakref
from typing import Any

import tensorflow as tf

_places: weakref.WeakKeyDictionary[Any, dict[str, dict[Any, int]]] = weakref.WeakKeyDictionary()
_places_lock = threading.Lock()
_BRANCH = re.compile(r"_(true|false|branch\d+|body|cond)_\d+$")


def position(name: str) -> str:
    """Return the position of the next reduction called ``name`` in the graph that is traced now.

    Several reductions may have the same name and be in flight at the same time. Their positions distinguish them. The
    positions are counted while the graph is traced, so ranks that trace the same code find the same positions. All
    branches of a condition have the same position, because different ranks may take different branches.
    """
    path: list[int] = []
    graph: Any = tf.compat.v1.get_default_graph()
    construct: Any = None  # the condition or loop whose branch or body the inner graph is
    # From the current graph outwards, each level adds the position of its reduction or construct. The names of branch
    # functions end with the branch and with numbers that differ between ranks, so the key is the name without that end.
    with _places_lock:
        while graph is not None:
            places = _places.setdefault(graph, {}).setdefault(name, {})
            key = len(places) if construct is None else construct
            path.insert(0, places.setdefault(key, len(places)))
            graph_name = getattr(graph, "name", "")
            construct = _BRANCH.sub("", graph_name)
            graph = graph.outer_graph if construct != graph_name else None
    while path and path[-1] == 0:  # no two paths become equal: a position has one reduction or construct
        path.pop()
    return ".".join(map(str, path))
