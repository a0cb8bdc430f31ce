"""What both packages share and no framework is needed for: checks, frequencies, text of masks."""
