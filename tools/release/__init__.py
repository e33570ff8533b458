"""Builds every distribution, and uses them as a stranger would: from their wheels, in fresh environments."""
