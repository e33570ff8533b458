"""``ddl conform --quick``: uses each installed plugin once, with three elements, in separate processes."""
