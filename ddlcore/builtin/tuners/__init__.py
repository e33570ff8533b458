"""The built-in tuners."""
