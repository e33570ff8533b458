"""``ddl conform``: runs the conformance kit on a plugin in a process of its own, and reports the level reached."""
