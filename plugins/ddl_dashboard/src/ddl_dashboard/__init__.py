"""The live page of a job: ``ddl run --dashboard``.

This package belongs to the ddlcore of the same version, and uses parts of it that are not public.
"""
