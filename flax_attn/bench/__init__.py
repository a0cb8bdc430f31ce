"""Benchmarks of time, memory and growth beside other implementations.

The library itself never imports this.
"""
