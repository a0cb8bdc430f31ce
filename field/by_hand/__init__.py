"""The verdicts on other people's ports, reached a second time without the harness.

Nothing here imports flax_attn. Both sides of a port are pure functions of the same arrays, under
the names that PyTorch has for them, so that weights are placed by the port's own converter or by
hand, and gradients come out in one layout. Of the harness' study only the configurations of
transformers' models are shared: `field.ports.hf_*`, which are data.
"""
