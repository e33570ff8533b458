"""The transport over the MPI library that mpi4py loads.

Users choose it with ``--backend mpi`` and need not import anything.
"""
