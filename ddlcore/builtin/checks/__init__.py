"""What `ddl doctor` looks at by itself; plugins add theirs through the same extension point."""
