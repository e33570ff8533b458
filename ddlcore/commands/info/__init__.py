"""``ddl info``: show what this machine has, and what is missing to use it."""
