"""Random search that narrows around the best: a tuner for ddl."""
