"""``ddl plugins``: what is installed and how it does, a three-element trial of each, and packages for new ones."""
