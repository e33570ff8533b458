"""The settings of a job: the table, the config file, and which source of a value has priority."""
