"""Models of both packages in float64."""

import jax.numpy as jnp
from flax import nnx

from flax_attn.proof.build import drawn


def in_float64(side, cls, config, **options):
    """Return a model in float64 and in eval mode; the options are those of Flax."""
    if not side.is_flax:
        return cls(config).double().eval()
    numerics = {"param_dtype": jnp.float64, **options}
    model = drawn(lambda: cls(config, rngs=nnx.Rngs(0), **numerics))
    model.eval()
    return model
