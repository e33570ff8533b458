"""The CPU kernels: loops over raw memory. numba compiles them once for each machine, and ranks load the machine code.

Importing this package imports neither numba nor llvmlite. `code.load` imports llvmlite, and only `compile` imports
numba.
"""
