"""The built-in checks of `ddl doctor`; plugins add more through the same extension point."""
