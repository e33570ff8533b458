"""``ddl doctor``: examine every host, measure the links between ranks, and say what is wrong and what to do."""
