"""What shows a job while it trains: the live page, ``ddl run --dashboard``, and the table of ``ddl run --top``.

This package belongs to the ddlcore of the same version, and uses parts of it that are not public.
"""
