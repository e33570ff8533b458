"""A transport composed of one within the hosts and another across them: reduce on each host, exchange, distribute."""
