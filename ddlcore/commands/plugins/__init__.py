"""``ddl plugins``: list the installed plugins and their state, try each plugin, and create packages for new plugins."""
