"""Pairs of modules that are the same function: the harness must call none of them different.

`python -m parity_tests.right_pairs` compares each at three sizes and some seeds, with all checks.
"""
