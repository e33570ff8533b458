"""The transport over Gloo. Users choose it with ``--backend gloo`` and need not import anything."""
