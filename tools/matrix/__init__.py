"""Runs the tests and examples with the versions of Python and of the frameworks that users have, one environment each."""
