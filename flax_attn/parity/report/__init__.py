"""The report of a comparison: as text, as a page, as files."""
