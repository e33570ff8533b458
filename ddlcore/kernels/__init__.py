"""The CPU kernels: loops over raw memory, written for numba, compiled once per machine and loaded as machine code.

Importing this package imports neither numba nor llvmlite; `code.load` imports llvmlite, and only `compile` imports
numba.
"""
