"""The targets' own tests of attention, with and without `flax_attn.everywhere`.

They come from their wheels and source distributions on PyPI, or from a checkout where these hold no
tests, and are never a part of this repository.
"""
