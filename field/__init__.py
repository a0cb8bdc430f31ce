"""Flax ports that other people wrote, judged by the harness: `make field`."""
