"""Attention compiled for devices that this machine does not have: memory, refusals and collectives. Nothing is run.

`program` compiles one function, `kernels` says what is compiled, `rows` compiles calls with several kernels, `report`
shows them, and `tpu` and `gpu` describe the devices.

Source: ahead-of-time compilation, `jax.experimental.topologies` (docs.jax.dev/en/latest/aot.html).
"""
