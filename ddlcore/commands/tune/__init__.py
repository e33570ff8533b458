"""``ddl tune``: run a training and search for better settings; write a config file and a report."""
