"""``ddl doctor``: examine every host, measure the links between ranks, and report each problem and its solution."""
