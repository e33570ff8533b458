"""The live page of a running job: what it is told, what it remembers, and the process that serves it."""
