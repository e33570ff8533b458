"""Stand for a library that is not installed: Keras imports it if it can, and nothing that runs here needs it."""

raise ImportError("left out of these tests, see plugins/ddl_tf/tests/launching.py")
