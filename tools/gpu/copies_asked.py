"""The rows and targets of copies on a GPU, also for machines on which they cannot be measured."""

from __future__ import annotations

__all__ = ["COPY_ROWS"]

COPY_ROWS = (
    ("pack: share of the device's copy bandwidth", "≥ 0.75 ×"),
    ("unpack: share of the device's copy bandwidth", "≥ 0.75 ×"),
    ("pack: speed over torch.cat", "≥ 1 ×"),
    ("pack: speed over torch._foreach_copy_", "≥ 1 ×"),
    ("unpack: speed over torch._foreach_copy_", "≥ 1 ×"),
    ("pack 400 tensors of 16 KiB, on the device", "≤ 25 µs"),
    ("unpack 400 tensors of 16 KiB, on the device", "≤ 25 µs"),
    ("one replayed bucket's copies, on the host", "≤ 40 µs"),
)
