"""``ddl tune``, and what `ddl run --autotune` tells of its search."""
