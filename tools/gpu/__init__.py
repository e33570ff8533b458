"""The parts of tools/gpu_check.py, each a program of its own: one that dies or hangs takes no other with it."""
