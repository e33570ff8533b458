"""Gradients as int8 with error feedback, a quarter of the bytes of float32: a compressor for ddl."""
