"""Functions in Python that numba compiles once for each machine. Ranks load their machine code, without numba.

The CPU kernels of ddl are made in this way, and a plugin can add functions of its own: `code.MachineCode` describes
them, `intrinsics` has what they are written with, and `cpu.CPU` are the CPU kernels, which they may call. Importing this
package imports neither numba nor llvmlite. `loading.load` imports llvmlite, and only `compile` imports numba.
"""
