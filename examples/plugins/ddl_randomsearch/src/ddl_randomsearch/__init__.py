"""A tuner for ddl: random search that narrows around the best values."""
