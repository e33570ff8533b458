"""The autotuner: what is searched, how a search proceeds, and who is told about it."""
