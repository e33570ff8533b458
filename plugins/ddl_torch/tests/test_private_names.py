"""The list of torch's private names is complete, and the installed torch has them."""

from __future__ import annotations

from pathlib import Path

import ddl_torch
import torch
import torch.distributed.fsdp._common_utils

from tests.private_names import check_private_names

# The names of torch that are not public and that ddl_torch uses: the first and the last release in which they were found.
NAMES = {
    "torch._C._current_autograd_node": "torch 2.10 to 2.15",
    "torch._C._distributed_c10d.Backend": "torch 2.10 to 2.15",
    "torch._C._distributed_c10d.ErrorType": "torch 2.10 to 2.15",
    "torch._C._distributed_c10d.Store": "torch 2.10 to 2.15",
    "torch._C._dynamo.eval_frame._FrameAction": "torch 2.10 to 2.15",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "torch 2.10 to 2.15",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "torch 2.10 to 2.15",
    "torch._C._storage_Use_Count": "torch 2.10 to 2.15",
    "torch._foreach_copy_": "torch 2.10 to 2.15",
    "torch._foreach_mul_": "torch 2.10 to 2.15",
    "torch._foreach_zero_": "torch 2.10 to 2.15",
    "torch.amp.GradScaler('cpu')._scale": "torch 2.10 to 2.15",
    "torch.amp.GradScaler._unscale_grads_": "torch 2.10 to 2.15",
    "torch.autograd.Variable._execution_engine": "torch 2.10 to 2.15",
    "torch.autograd._profiler_enabled": "torch 2.10 to 2.15",
    "torch.distributed.ProcessGroup._allgather_base": "torch 2.10 to 2.15",
    "torch.distributed.ProcessGroup._reduce_scatter_base": "torch 2.10 to 2.15",
    "torch.distributed.ProcessGroupGloo._Options": "torch 2.10 to 2.15",
    "dict.fromkeys([torch.distributed.fsdp._common_utils.FSDP_FLATTENED])['_fsdp_flattened']": "torch 2.10 to 2.15",
    "torch.nn.Module()._modules": "torch 2.10 to 2.15",
    "torch.nn.modules.batchnorm._BatchNorm": "torch 2.10 to 2.15",
    "torch.optim.SGD([torch.zeros(1)], 0.1)._optimizer_step_post_hooks": "torch 2.10 to 2.15",
    "torch.optim.SGD([torch.zeros(1)], 0.1)._optimizer_step_pre_hooks": "torch 2.10 to 2.15",
    "torch.optim.SGD([torch.zeros(1)], 0.1)._zero_grad_profile_name": "torch 2.10 to 2.15",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "torch 2.10 to 2.15",
    "torch.zeros(1)._post_accumulate_grad_hooks": "torch 2.10 to 2.15",
    "torch.zeros(1)._version": "torch 2.10 to 2.15",
    "torch.zeros(1).untyped_storage()._cdata": "torch 2.10 to 2.15",
}

# An attribute that this package sets, the beginning of names, and what Python documents.
OURS = {"_ddl_stepped", "_optimizer_", "_getframe", "_replace"}


def test_private_names() -> None:
    """A name that a release of torch has no longer is found here, before anything that uses it."""
    check_private_names(Path(ddl_torch.__file__).parent, NAMES, {"torch": torch}, OURS)
