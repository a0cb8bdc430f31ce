"""Devices that this machine does not have, described for XLA, which then compiles for them. Nothing is run.

Source: ahead-of-time compilation, `jax.experimental.topologies` (docs.jax.dev/en/latest/aot.html).
"""
