"""``ddl conform``: runs the conformance kit on an installed plugin, in a process of its own, and tells the level reached."""
