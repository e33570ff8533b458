"""One rank's work and the coordinator's decisions; knows no framework, no plugin and no environment."""
