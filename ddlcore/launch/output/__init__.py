"""What a job shows: the ranks' lines and those of ddl, on the terminal and in files."""
