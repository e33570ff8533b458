"""Collectives over ZeroMQ: a transport for ddl."""
