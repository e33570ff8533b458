"""A transport composed of two: one within each host, one across hosts.

It reduces on each host, exchanges, distributes.
"""
