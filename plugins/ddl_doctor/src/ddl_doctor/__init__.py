"""Examine hosts and jobs, and measure: the commands ``ddl doctor``, ``ddl bench`` and ``ddl timeline``.

This package belongs to the ddlcore of the same version, and uses all of it. Other plugins use only its public part.
"""
