"""``ddl conform``: runs the conformance kit on a plugin, and reports which level of conformance the plugin reaches.

The tests run in another process, because a plugin may hang or crash.
"""
