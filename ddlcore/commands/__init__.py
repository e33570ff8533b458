"""The ``ddl`` program. Each of its commands has a folder here, which reads the command line and prints the result."""
