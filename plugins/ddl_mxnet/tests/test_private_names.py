"""The list of MXNet's private names is complete, and the installed MXNet has them."""

from __future__ import annotations

from pathlib import Path

import ddl_mxnet
import mxnet

from tests.private_names import check_private_names

# The names of MXNet that are not public and that ddl_mxnet uses: the first and the last release in which they were found.
NAMES = {
    "mxnet.base._LIB._ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv": "mxnet 1.9 to 1.9",
    "mxnet.base._LIB._ZNSt13runtime_errorC1EPKc": "mxnet 1.9 to 1.9",
    "mxnet.base._LIB._ZNSt13runtime_errorD1Ev": "mxnet 1.9 to 1.9",
    "mxnet.gluon.Parameter('x')._data": "mxnet 1.9 to 1.9",
    "mxnet.gluon.Parameter('x')._deferred_init": "mxnet 1.9 to 1.9",
    "mxnet.gluon.Parameter('x')._differentiable": "mxnet 1.9 to 1.9",
    "mxnet.gluon.Parameter('x')._finish_deferred_init": "mxnet 1.9 to 1.9",
    "mxnet.gluon.Parameter('x')._grad": "mxnet 1.9 to 1.9",
    "mxnet.gluon.Parameter('x')._stype": "mxnet 1.9 to 1.9",
    "mxnet.nd.NDArray._sync_copyfrom": "mxnet 1.9 to 1.9",
    "mxnet.nd.ndarray._new_alloc_handle": "mxnet 1.9 to 1.9",
}
OURS = {"_ddl_mxnet_numpy.mend_numpy"}


def test_private_names() -> None:
    """A name that a release of MXNet has no longer is found here, before anything that uses it."""
    check_private_names(Path(ddl_mxnet.__file__).parent, NAMES, {"mxnet": mxnet}, OURS)
