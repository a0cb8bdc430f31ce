"""How Hugging Face stores mixtures of experts: a weight for each expert, or one for all."""

from flax_attn.convert.rules import Layout, Rule
from flax_attn.models.hugging_face.decoder import decoder_layout
from flax_attn.models.hugging_face.family import linears

_OURS = "trf_blocks.{i}.ff.experts"
_KERNELS = tuple(f"{_OURS}.{name}.kernel" for name in ("W_gate", "W_up"))
_BIASES = tuple(f"{_OURS}.{name}.bias" for name in ("W_gate", "W_up"))


def one_by_one(
    mixture: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    others: tuple[Rule, ...] = (),
) -> Layout:
    """Return the layout of decoders whose experts are stored one by one, as on the Hub.

    Args:
        mixture: name of the mixture in layer `{i}`.
        gate: name of the gate projection.
        up: name of the up projection.
        down: name of the down projection.
        others: further rules.

    Example:
        >>> one_by_one("model.layers.{i}.mlp").rules[2].theirs
        'model.layers.{i}.mlp.experts.*.gate_proj.weight'
    """
    names = {"W_gate": gate, "W_up": up, "W_down": down}
    return _with_router(
        f"{mixture}.gate",
        *(
            Rule(
                (f"{_OURS}.{ours}.kernel",),
                f"{mixture}.experts.*.{theirs}.weight",
                "e i o -> e o i",
            )
            for ours, theirs in names.items()
        ),
        *others,
    )


def fused(mixture: str, *others: Rule) -> Layout:
    """Return the layout of decoders whose experts are fused, as in transformers 5.

    Args:
        mixture: name of the mixture in layer `{i}`.
        others: further rules.

    Example:
        >>> fused("model.layers.{i}.mlp").rules[2].theirs
        'model.layers.{i}.mlp.experts.gate_up_proj'
    """
    return _with_router(
        f"{mixture}.gate",
        Rule(_KERNELS, f"{mixture}.experts.gate_up_proj", "e i o -> e o i", axis=1),
        Rule((f"{_OURS}.W_down.kernel",), f"{mixture}.experts.down_proj", "e i o -> e o i"),
        *others,
    )


def interleaved(mixture: str, *others: Rule) -> Layout:
    """Return the layout of gpt-oss: kernels as ours, the features of gate and up in turn.

    `others` are further rules.

    Example:
        >>> interleaved("model.layers.{i}.mlp").rules[2].theirs
        'model.layers.{i}.mlp.experts.gate_up_proj'
    """
    return _with_router(
        f"{mixture}.router",
        Rule(_KERNELS, f"{mixture}.experts.gate_up_proj", axis=2, interleaved=True),
        Rule((f"{_OURS}.W_down.kernel",), f"{mixture}.experts.down_proj"),
        Rule(_BIASES, f"{mixture}.experts.gate_up_proj_bias", axis=1, interleaved=True),
        Rule((f"{_OURS}.W_down.bias",), f"{mixture}.experts.down_proj_bias"),
        *others,
    )


def _with_router(name: str, *rules: Rule) -> Layout:
    return decoder_layout(*linears({"trf_blocks.{i}.ff.router.W_router": name}), *rules)
