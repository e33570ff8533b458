"""What a job does, written down beside it: the timeline and the flight recorder. Nothing here decides or waits."""
