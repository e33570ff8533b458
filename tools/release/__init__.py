"""Builds every distribution, and uses them as a new user would: from their wheels, in fresh environments."""
