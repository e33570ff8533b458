"""Registers ddl_tf with the core as plain data. Imports neither TensorFlow nor any module that imports TensorFlow."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, CheckProvider, ReleaseRange, hookimpl


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """Return the description of the adapter for TensorFlow's tensors."""
    return [
        AdapterProvider(
            name="tensorflow",
            target="ddl_tf.adapter:TfAdapter",
            requires=("tensorflow",),
            install="pip install tensorflow",
            probe="ddl_tf.supported:installed_objection",
            doc="TensorFlow tensors",
            module="ddl_tf",
            framework="tensorflow",
            tested=(ReleaseRange("tensorflow", "2.16", "2.22"),),
            loaders=("tensorflow.python.data", "keras.src.trainers.data_adapters"),
            suite="ddl_tf.conformance:TfSuite",
        )
    ]


@hookimpl
def ddl_checks() -> list[CheckProvider]:
    """Return the descriptions of this plugin's checks for `ddl doctor`."""
    return [
        CheckProvider(
            "known-bad-tensorflow", "ddl_tf.checks:KnownBadTensorFlow", doc="several TensorFlows side by side"
        )
    ]
