"""One transport within the hosts and another across them, as one: reduce on each host, cross, and spread."""
