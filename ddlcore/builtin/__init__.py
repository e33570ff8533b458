"""The built-in transports, adapter, policies and compressors: they come through the same doors as anybody's."""
