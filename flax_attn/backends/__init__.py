"""The kernels of `dot_product_attention`, one file each: `refuse`, then `attend`, then `memory`."""
