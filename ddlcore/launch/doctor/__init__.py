"""`ddl doctor`: has every host looked at, measures what is between them, and says what is wrong and what to do."""
