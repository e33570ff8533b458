"""``ddl bench``: time collectives of ddl and of peers that plugins provide, in alternation."""
