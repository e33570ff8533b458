"""The ``ddl`` program: a folder for each of its commands, which reads a command line and prints the result."""
