"""Devices that this machine does not have, described so that XLA compiles for them. Nothing is run.

Source: ahead-of-time compilation, `jax.experimental.topologies` (docs.jax.dev/en/latest/aot.html).
"""
