"""The attention variants, and the layers around them, as Flax NNX modules."""
