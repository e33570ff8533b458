"""The built-in transports, adapter, policies and compressors, registered through the same extension points as plugins."""
