"""The proof that a variant in `flax_attn` and its twin in `torch_ref` are the same function."""
