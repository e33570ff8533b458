"""The list of private names of torch and tf_keras is complete, and the installed releases have them."""

from __future__ import annotations

from pathlib import Path

import ddl_horovod
import pytest

from tests.private_names import check_private_names

# The names that are not public and that ddl_horovod uses: the first and the last release in which they were found.
NAMES = {
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._aggregate_gradients": "tf_keras 2.21 to 2.21",
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._compute_gradients": "tf_keras 2.21 to 2.21",
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._create_all_weights": "tf_keras 2.21 to 2.21",
    "vars(scheduled())['_wrapped_by_lr_sched']": "torch 2.13 to 2.15",
}
OURS = {"_agg_helper", "_ddl_computed"}  # attributes that this package sets


def test_private_names() -> None:
    """A name that a release of one of them has no longer is found here, before anything that uses it."""
    torch = pytest.importorskip("torch", reason="the list has names of torch")

    def scheduled() -> object:
        optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer.step

    check_private_names(Path(ddl_horovod.__file__).parent, NAMES, {"scheduled": scheduled}, OURS)
