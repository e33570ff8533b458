"""The built-in tuners, which search for the settings with which a step takes the least time."""
