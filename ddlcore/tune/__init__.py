"""The autotuner: the settings that are searched, the course of a search, and the log of a search."""
