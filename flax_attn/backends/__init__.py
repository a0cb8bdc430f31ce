"""Kernels behind `dot_product_attention`, a file each: `refuse` first, then `attend`, then `memory`."""
