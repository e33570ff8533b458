"""Tell the launcher how each rank is: its load, its progress, and what it waits for."""
