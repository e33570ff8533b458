"""Gloo as a transport of ddl; users choose it by ``--backend gloo``, and need not import anything."""
