"""The list of torch's private names is complete, and the installed torch has them."""

from __future__ import annotations

from pathlib import Path

import ddl_gloo

from tests.private_names import check_private_names

# The names of torch that are not public and that ddl_gloo uses: the first and the last release in which they were found.
NAMES = {
    "torch._C._distributed_c10d.Store": "torch 2.10 to 2.15",
    "torch.distributed.ProcessGroupGloo._Options": "torch 2.10 to 2.15",
}


def test_private_names() -> None:
    """A name that a release of torch has no longer is found here, before anything that uses it."""
    check_private_names(Path(ddl_gloo.__file__).parent, NAMES, {})
