"""``ddl plugins new``: writes the package of a new plugin, whose tests fail only for what is still to be written."""
