"""``ddl run``: start a job on this host and on other hosts."""
