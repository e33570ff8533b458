"""``ddl bench``: collectives timed in alternation, ddl's own and those of peers that plugins provide."""
