"""NCCL as a transport of ddl, and the kernels of CUDA devices; users need not import anything."""
