"""A rank's own device, in TensorFlow's numbering."""

from __future__ import annotations

import ddl_tf as ddl
import pytest
import tensorflow as tf

from ddlcore.testing import World


@pytest.mark.parametrize(("count", "devices"), [(0, ["/cpu:0"] * 2), (1, ["/gpu:0"] * 2), (2, ["/gpu:0", "/gpu:1"])])
def test_local_device(monkeypatch: pytest.MonkeyPatch, count: int, devices: list[str]) -> None:
    """Only devices visible to TensorFlow count, and the name is one that tf.device accepts."""
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind] * count)
    with World(2) as world:
        assert world.run(lambda rank, job: ddl.local_device()) == devices
    was = tf.config.get_soft_device_placement()  # off if the first test of this process has built a graph
    tf.config.set_soft_device_placement(True)
    try:
        with tf.device(devices[0]):
            assert tf.constant(1).shape == ()
    finally:
        tf.config.set_soft_device_placement(was)
