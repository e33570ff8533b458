"""Why names and signatures of ddl-horovod differ from those of Horovod 0.28.1. docs/moving.md says the same to users."""

from __future__ import annotations

COMPILED = "there is no compiled library"
ACCIDENT = "a helper for annotations or from another module, imported there by accident"
INSIDE = "a part of the implementation, which ddl does in another way"

# "MODULE.NAME is missing", by its beginning.
ABSENT = {
    "horovod.common.basics.MPI": ACCIDENT,
    "horovod.common.process_sets.MPI": ACCIDENT,
    "horovod.common.process_sets.HorovodBasics": ACCIDENT,
    "horovod.common.elastic.HostUpdateResult": INSIDE,
    "horovod.common.elastic.WorkerNotificationManager": INSIDE,
    "horovod.common.elastic.notification_manager": INSIDE,
    "horovod.common.elastic.State.on_hosts_updated": INSIDE,
    "horovod.common.elastic.State.on_reset": INSIDE,
    "horovod.mxnet.mpi_ops.MPI_MXNET_LIB_CTYPES": COMPILED,
    "horovod.mxnet.mpi_ops.dll_path": COMPILED,
    "horovod.tensorflow.mpi_ops.MPI_LIB": COMPILED,
    "horovod.mxnet.DistributedOptimizer.": "a function, whose result is the optimizer itself and has these methods",
    "horovod.tensorflow.device_compatibility_check": INSIDE,
    "horovod.torch.elastic.state.ModelStateHandler": INSIDE,
    "horovod.torch.elastic.state.OptimizerStateHandler": INSIDE,
    "horovod.torch.elastic.state.SamplerStateHandler": INSIDE,
    "horovod.torch.elastic.state.StateHandler": INSIDE,
    "horovod.torch.elastic.state.get_handler_registry": "any object with state_dict and load_state_dict is handled",
    "horovod.torch.elastic.state.set_handler_registry": "any object with state_dict and load_state_dict is handled",
    "horovod.torch.mpi_ops.Horovod": INSIDE,
    "horovod.torch.sync_batch_norm.torch": ACCIDENT,
    "horovod.tensorflow.data.compute_worker.parsed_args": ACCIDENT,
    "horovod.tensorflow.data.compute_worker.parser": ACCIDENT,
    "horovod.tensorflow.data.compute_worker.secret": ACCIDENT,
}
# Parameters that Horovod's functions do not have. All of them come after Horovod's, or by keyword only.
FURTHER = {
    "compression": "MXNet's reductions can be compressed, too",
    "device": "TensorFlow's join takes one, as PyTorch's does",
    "device_dense": "as in TensorFlow",
    "device_sparse": "as in TensorFlow",
    "filepath": "where BestModelCheckpoint writes",
    "process_set": "also where Horovod knows only all ranks",
    "host": "the address of a ComputeService",
    "rollback": "how far elastic training goes back",
    "weight": "what a rank's values count for in an average",
    "job": "PyTorch's SyncBatchNorm of a world of threads",
}
# What else may be said of a function, by the end of its name and the beginning of the difference.
OTHER = {
    ("ComputeService.__init__", "nics is"): "the service is reached at the address of its host that ddl has found",
    ("", "compression is None"): "None means the setting `compression`, which is none unless a user sets it",
}
