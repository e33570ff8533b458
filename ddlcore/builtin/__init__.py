"""The built-in transports, launchers, compressors and so on. They are registered in the same way as plugins."""
