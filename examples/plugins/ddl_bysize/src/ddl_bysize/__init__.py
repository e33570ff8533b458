"""Buckets of tensors of like size, the small ones first: a fusion policy for ddl."""
