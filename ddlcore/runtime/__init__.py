"""The modules that do the work of one rank. They know no framework, no plugin and no environment variable."""
