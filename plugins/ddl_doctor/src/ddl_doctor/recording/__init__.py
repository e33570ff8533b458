"""Record timelines: each rank writes its part, and the launcher or rank 0 merges the parts into one trace."""
