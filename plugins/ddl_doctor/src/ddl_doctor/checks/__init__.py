"""The built-in checks of `ddl doctor`. Plugins can add further checks."""
