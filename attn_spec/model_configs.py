"""The sizes that the config of every model of a kind has, whatever its family."""

from typing import Protocol, runtime_checkable

from attn_spec.checks import kind_of


@runtime_checkable
class ModelConfig(Protocol):
    """The sizes that the config of every language model has."""

    @property
    def d_model(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tied(self) -> bool: ...


@runtime_checkable
class EncoderConfig(Protocol):
    """The sizes that the config of every encoder has."""

    @property
    def d_model(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


@runtime_checkable
class EncoderDecoderConfig(Protocol):
    """The sizes that the config of every encoder-decoder has."""

    @property
    def d_model(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_decoder_layers(self) -> int: ...
    @property
    def context_length(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def start_token(self) -> int: ...


_NAMES_AND_EXAMPLES = {
    ModelConfig: ("a language model", "GPT2Config(d_model=64, num_heads=4, num_layers=2)"),
    EncoderConfig: ("an encoder", "BertConfig(d_model=64, num_heads=4, num_layers=2)"),
    EncoderDecoderConfig: (
        "an encoder-decoder",
        "T5Config(d_model=64, d_hidden=256, num_heads=4, head_dim=16, num_layers=2,"
        " num_decoder_layers=2)",
    ),
}


def check_config(config: object, kind: type) -> None:
    """Raise unless a config has the sizes of `kind`, one of the protocols above."""
    if not isinstance(config, kind):
        model, example = _NAMES_AND_EXAMPLES[kind]
        *sizes, last = [name for name, value in vars(kind).items() if isinstance(value, property)]
        raise ValueError(
            f"the config of {model} has {', '.join(sizes)} and {last}; got {kind_of(config)}. Pass"
            f" one, such as {example}"
        )
