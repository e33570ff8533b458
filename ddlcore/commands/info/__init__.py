"""``ddl info``: show the hardware and software of this machine, and how to install the missing parts."""
