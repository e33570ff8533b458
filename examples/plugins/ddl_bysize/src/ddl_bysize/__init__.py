"""A fusion policy for ddl: puts tensors of similar size into one bucket, small tensors first."""
