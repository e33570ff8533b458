"""A compressor for ddl: gradients as int8 with error feedback, in a quarter of the bytes of float32."""
