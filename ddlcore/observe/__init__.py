"""Record what a job does: the timeline and the flight recorder. Nothing here decides for the job or blocks it."""
