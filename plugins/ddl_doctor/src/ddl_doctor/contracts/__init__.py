"""What plugins add to `ddl doctor` and `ddl bench`. They import it from ``ddlcore.contracts``, which forwards to here."""
