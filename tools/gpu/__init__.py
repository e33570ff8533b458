"""The parts of tools/gpu_check.py, each a program of its own: one that crashes or hangs does not stop the others."""
