"""Stacks of other libraries' layers, as they are and under `flax_attn.everywhere`."""
