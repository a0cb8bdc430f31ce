"""Modules that hold what they are given, by name and in the order given."""

from flax import nnx
from torch import nn


class Flax(nnx.Module):
    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)


class Torch(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
