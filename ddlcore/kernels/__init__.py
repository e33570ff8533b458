"""The CPU kernels: loops over raw memory, written for numba, compiled once a machine and loaded as machine code.

Importing anything here imports neither numba nor llvmlite; `code.load` loads the latter, only `compile` the former.
"""
