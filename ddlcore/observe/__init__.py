"""Observation of a job: the timeline, the flight recorder, and what a rank is doing or waiting for.

The code in this package never blocks the job, and makes no decision for it.
"""
