"""MPI for ddl: a transport by the MPI that mpi4py loads. Users import nothing from here: `ddl run --backend mpi`."""
