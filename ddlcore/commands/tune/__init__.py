"""``ddl tune``, and the messages of the search that ``ddl run --autotune`` runs."""
