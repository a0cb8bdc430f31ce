"""Which parameter of a JAX model is which of a PyTorch model: `auto`, and what it is made of."""
