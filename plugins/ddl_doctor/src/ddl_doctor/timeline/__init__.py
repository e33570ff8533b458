"""``ddl timeline``: summarise the timeline that a job has written, or merge the parts of the timeline."""
