"""Run ranks on other hosts: start an agent on each host, exchange messages with it, and let it start its ranks."""
