"""The attention variants, and the layers around them, as PyTorch modules."""
