"""Ports to judge, one file per library; each defines `ports()`, which returns `Port` rows."""
