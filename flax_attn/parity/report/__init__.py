"""What is said about a comparison: on a terminal, on a page, to programs."""
