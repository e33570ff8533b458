"""Reads device labels. A device label is the text in ``Spec.device`` that names a device.

A label contains the kind of the device and, for the second and further devices of a rank, a number. A suffix says that
the user asked for staging on the host.
"""

from __future__ import annotations

ON_HOST = "@host"  # suffix of a label: the user asked that this be staged on the host


def kind_of(label: str) -> str:
    """Return the kind of the device that ``label`` names, such as "cpu". ``label`` is the ``device`` of a Spec."""
    return label_of_stream(label).partition("+")[0]


def label_of_stream(label: str) -> str:
    """Return the part of ``label`` that names the device, without the suffix that asks for staging on the host.

    That part is the kind of the device. For the second device of the rank, ``+1`` follows the kind.
    """
    return label.removesuffix(ON_HOST)


def describe_device(label: str) -> str:
    """Return a description of the device that ``label`` names, for messages. ``label`` is the ``device`` of a Spec."""
    kind, _, number = label_of_stream(label).partition("+")
    nth = f", device {int(number) + 1} of the rank" if number else ""
    return f"{kind}{nth}{', staged on the host' if label.endswith(ON_HOST) else ''}"
