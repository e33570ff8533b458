"""Reads the label by which a Spec names a device: its kind, its number on the rank, and if it is staged on the host."""

from __future__ import annotations

ON_HOST = "@host"  # suffix of a label: the user asked that this be staged on the host


def kind_of(label: str) -> str:
    """Return the kind of device that ``label``, the ``device`` of a Spec, names."""
    return label_of_stream(label).partition("+")[0]


def label_of_stream(label: str) -> str:
    """Return the part of ``label`` that names the device, which is the device's kind and ``+1`` for the second one.

    The rest of a label says whether tensors are staged on the host.
    """
    return label.removesuffix(ON_HOST)


def describe_device(label: str) -> str:
    """Return ``label``, the ``device`` of a Spec, in words."""
    kind, _, number = label_of_stream(label).partition("+")
    nth = f", device {int(number) + 1} of the rank" if number else ""
    return f"{kind}{nth}{', staged on the host' if label.endswith(ON_HOST) else ''}"
