"""NCCL as a transport of ddl, and the kernels for CUDA devices. Users need not import this package."""
