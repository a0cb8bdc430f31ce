"""Drawing the parameters of a whole model."""

from collections.abc import Callable

from flax import nnx

from flax_attn.modules.initialisation import filled, next_key, normal


def draw(model: nnx.Module, rngs: nnx.Rngs, std: Callable[[tuple], float] | None = None) -> None:
    """Draw kernels and tables from a normal distribution; biases are 0, norms keep 1 and 0.

    Args:
        model: model whose parameters are drawn.
        rngs: random streams, of which `params` is used.
        std: standard deviation, by the path of a parameter; None is 0.02 for all.

    Example:
        >>> from flax_attn import Linear
        >>> layer = Linear(2, 3, rngs=nnx.Rngs(0))
        >>> draw(layer, nnx.Rngs(0))
        >>> layer.bias[...].tolist()
        [0.0, 0.0, 0.0]

    References:
        Devlin et al. 2018 (arXiv:1810.04805), whose published code draws with this deviation.
    """
    for path, param in nnx.iter_graph(model):
        if not isinstance(param, nnx.Param):
            continue
        name = path[-1]
        if name == "bias":
            zeros = filled(param.shape, 0, param.dtype)
            param.set_value(zeros)
        elif name in ("kernel", "embedding"):
            deviation = 0.02 if std is None else std(path)
            draw_normal = normal(deviation)
            key = next_key(rngs.params)
            value = draw_normal(key, param.shape, param.dtype)
            param.set_value(value)
