"""The live page of a running job: the records sent to it, the history that it shows, and the process that serves it."""
