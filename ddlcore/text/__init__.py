"""Format text for people to read: aligned columns, numbers with units, HTML pages."""
