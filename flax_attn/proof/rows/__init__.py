"""The rows of the table of variants, a file for each kind."""
