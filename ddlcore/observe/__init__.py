"""Observation of a job: the timeline, the flight recorder, pulses, samples and metrics.

The code in this package never blocks the job, and makes no decision for it.
"""
