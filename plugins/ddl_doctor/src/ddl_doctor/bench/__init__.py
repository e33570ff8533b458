"""``ddl bench``: time the collectives of ddl and those of peers (other libraries, called by plugins), in turns."""
