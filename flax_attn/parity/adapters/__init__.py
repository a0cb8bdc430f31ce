"""The implementations that are compared: each behind the same specs."""
