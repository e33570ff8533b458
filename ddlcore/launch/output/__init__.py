"""Show the output of a job on the terminal and write it to files: the lines of the ranks and the lines of ddl."""
