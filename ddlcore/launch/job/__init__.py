"""Run one whole job: choose the hosts of the ranks, start and watch the ranks, and report how the job has ended."""
