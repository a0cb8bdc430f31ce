"""How Hugging Face stores Gated DeltaNets and gated attention.

Projections are fused, and the rows of each head stand together.
"""

from flax_attn.convert.rules import Rule

_ATT = "trf_blocks.{i}.att"


def delta_net(name: str) -> tuple[Rule, ...]:
    """Return the rules of the layers with a Gated DeltaNet, called `name` in layer `{i}`.

    Example:
        >>> delta_net("model.layers.{i}.linear_attn")[0].theirs
        'model.layers.{i}.linear_attn.in_proj_qkvz.weight'
    """
    # Softmax layers have some of the same names, and no rate.
    recurrent = f"{_ATT}.rate.A_log"

    def by_key_head(theirs: str, *ours: str) -> Rule:
        """Return a rule of fused weights: each key head's rows, then those of its value heads."""
        return Rule(
            _kernels(*ours), theirs, "i (k f) -> k f i", axis=1, grouped=True, beside=recurrent
        )

    return (
        by_key_head(f"{name}.in_proj_qkvz.weight", "W_query", "W_key", "W_value", "W_gate"),
        by_key_head(f"{name}.in_proj_ba.weight", "W_beta", "W_decay"),
        # One convolution of the features of all three, each feature by itself.
        Rule(
            _kernels("conv_query", "conv_key", "conv_value"),
            f"{name}.conv1d.weight",
            "w d -> d 1 w",
        ),
        Rule((f"{_ATT}.rate.A_log",), f"{name}.A_log"),
        Rule((f"{_ATT}.rate.dt_bias",), f"{name}.dt_bias"),
        Rule((f"{_ATT}.norm.scale",), f"{name}.norm.weight"),
        Rule(_kernels("out_proj"), f"{name}.out_proj.weight", "i o -> o i", beside=recurrent),
    )


def gated_queries(name: str) -> tuple[Rule, ...]:
    """Return the rules of the projection `name` in layer `{i}`: the query and gate of each head.

    Example:
        >>> [rule.theirs for rule in gated_queries("model.layers.{i}.self_attn.q_proj")]
        ['model.layers.{i}.self_attn.q_proj.weight', 'model.layers.{i}.self_attn.q_proj.bias']
    """
    biases = tuple(kernel.replace("kernel", "bias") for kernel in _kernels("W_query", "W_gate"))
    return (
        Rule(
            _kernels("W_query", "W_gate"),
            f"{name}.weight",
            "i (n h) -> n h i",
            axis=1,
            grouped=True,
        ),
        Rule(biases, f"{name}.bias", "(n h) -> n h", axis=1, grouped=True),
    )


def _kernels(*names: str) -> tuple[str, ...]:
    return tuple(f"{_ATT}.{name}.kernel" for name in names)
