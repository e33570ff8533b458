"""``ddl timeline``: read the timeline of a job."""
