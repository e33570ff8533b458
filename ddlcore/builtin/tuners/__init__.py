"""The searches that come with ddl."""
