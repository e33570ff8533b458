"""Observation of a job: the flight recorder, the stacks of threads, and the files of a timeline.

The code in this package never blocks the job, and makes no decision for it.
"""
