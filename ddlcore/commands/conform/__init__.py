"""``ddl conform``: run the conformance kit on an installed plugin."""
