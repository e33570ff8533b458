"""The version of ddl. Its packages have the same."""

VERSION = "0.1.0"
