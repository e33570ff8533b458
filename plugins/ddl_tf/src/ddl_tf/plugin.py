"""Introduces ddl_tf to the core by data alone: it imports neither TensorFlow nor anything that does."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, CheckProvider, hookimpl

__all__ = ["ddl_adapters", "ddl_checks"]


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """TensorFlow's tensors."""
    return [
        AdapterProvider(
            name="tensorflow",
            target="ddl_tf.adapter:TfAdapter",
            requires=("tensorflow",),
            install="pip install tensorflow",
            doc="TensorFlow tensors",
            module="ddl_tf",
            framework="tensorflow",
            loaders=("tensorflow.python.data", "keras.src.trainers.data_adapters"),
            suite="ddl_tf.conformance:TfSuite",
        )
    ]


@hookimpl
def ddl_checks() -> list[CheckProvider]:
    """For `ddl doctor`."""
    return [
        CheckProvider(
            "known-bad-tensorflow", "ddl_tf.checks:KnownBadTensorFlow", doc="several TensorFlows side by side"
        )
    ]
