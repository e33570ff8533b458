"""MPI as a transport of ddl; it uses the MPI that mpi4py loads.

Users choose it with ``--backend mpi`` and import nothing.
"""
