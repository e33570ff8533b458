"""``ddl plugins``: list the installed plugins and their state, try each one, and write packages for new ones."""
