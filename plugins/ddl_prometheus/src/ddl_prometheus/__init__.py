"""The numbers of the ranks for Prometheus: ``ddl run --metrics-port``.

This package belongs to the ddlcore of the same version, and uses parts of it that are not public.
"""
