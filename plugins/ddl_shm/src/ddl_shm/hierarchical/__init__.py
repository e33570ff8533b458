"""A transport that is composed of two other transports: one connects the ranks of a host, the other connects hosts.

An allreduce has three steps. First the tensors are reduced on each host. Then the hosts exchange their sums. Finally
the result is distributed to the ranks of each host.
"""
