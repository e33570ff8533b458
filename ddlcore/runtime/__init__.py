"""Does one rank's work and makes the coordinator's decisions; knows no framework, no plugin and no environment."""
