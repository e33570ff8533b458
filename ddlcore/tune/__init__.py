"""The autotuner: what is searched, how a search goes, and what is told of it."""
