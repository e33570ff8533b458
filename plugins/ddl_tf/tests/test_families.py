"""Which Keras is in use: another backend than TensorFlow is refused in one line that says what to set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ddl_tf.keras import families


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_another_backend_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keras = SimpleNamespace(backend=SimpleNamespace(backend=lambda: backend))
    monkeypatch.setattr(families, "tf", SimpleNamespace(keras=keras))
    with pytest.raises(ImportError) as caught:
        families.the_keras()
    text = str(caught.value)
    assert f"'{backend}'" in text and "set KERAS_BACKEND=tensorflow" in text and "\n" not in text


def test_a_backend_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Keras cannot import its backend, the first cause is shown with the same advice."""

    class Lazy:
        @property
        def backend(self) -> object:
            try:
                raise ModuleNotFoundError("No module named 'jax'")
            except ModuleNotFoundError as error:
                raise ImportError("keras cannot be imported") from error

    monkeypatch.setattr(families, "tf", SimpleNamespace(keras=Lazy()))
    with pytest.raises(ImportError, match=r"No module named 'jax'.*set KERAS_BACKEND=tensorflow"):
        families.the_keras()
