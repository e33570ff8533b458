"""Raises in a world of one while MXNet's engine still has collectives to hand over."""

from __future__ import annotations

import sys
from typing import Any

unwanted: Any = dict.fromkeys(("matplotlib", "onnx", "pandas", "scipy", "sklearn"))
sys.modules.update(unwanted)  # MXNet imports them if it can, which takes longer than all the rest

import ddl_mxnet as ddl  # noqa: E402
import mxnet as mx  # noqa: E402

ddl.init()
array = mx.nd.ones((600, 600))
for _ in range(12):
    array = mx.nd.dot(array, array) * 1e-4
kept = [ddl.allreduce_(array) for _ in range(3)]
raise ValueError("the script's own")
