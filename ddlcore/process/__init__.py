"""What makes this process a rank: who has started it, its job, and the parts of that job."""
