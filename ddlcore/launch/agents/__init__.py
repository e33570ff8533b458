"""The ranks of other hosts: choose and start the agents there, talk with them, and let each start its host's ranks."""
