"""NCCL as a transport of ddl, and the kernels for CUDA devices; users need not import this package."""
