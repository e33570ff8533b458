"""Introduces ddl_tf to the core by data alone: it imports neither TensorFlow nor anything that does."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, hookimpl

__all__ = ["ddl_adapters"]


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
