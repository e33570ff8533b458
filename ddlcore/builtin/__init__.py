"""The built-in transports, adapter, policies and compressors. They use the same extension points as plugins."""
