"""The autotuner: which settings are searched, how a search proceeds, and who is told about it."""
