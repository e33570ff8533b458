"""The built-in transports, adapter, policies and compressors: they come through the same extension points as anybody's."""
