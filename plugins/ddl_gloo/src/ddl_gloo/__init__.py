"""Gloo as a transport of ddl. Users choose it with ``--backend gloo`` and need not import anything."""
