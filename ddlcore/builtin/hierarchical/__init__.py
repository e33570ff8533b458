"""A transport that is composed of two: one within each host, and one across hosts.

An allreduce first reduces on each host, then exchanges the sums of the hosts, and then distributes the result on each
host.
"""
