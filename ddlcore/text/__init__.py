"""Lay out text for people, whatever it is about: aligned columns, numbers with units, HTML pages."""
