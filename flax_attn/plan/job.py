"""What is planned: a model, a batch of tokens, and how both lie on the chips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attn_spec.checks import check_positive
from attn_spec.frequencies import YaRNScaling
from attn_spec.hugging_face.fields import read_fields
from flax_attn.functional.positions import RoPE
from flax_attn.models.deepseekv3 import DeepseekV3, DeepseekV3Config
from flax_attn.models.gpt2 import GPT2, GPT2_CONFIGS
from flax_attn.models.hugging_face.folder import read_config
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.layer_pattern import UnequalLayersError
from flax_attn.models.llama import Llama, LlamaConfig
from flax_attn.models.mixtral import Mixtral, MixtralConfig
from flax_attn.models.registry import FAMILIES, model_class
from flax_attn.plan.topology import Topology
from flax_attn.sharding.axes import rules, table

_LLAMA3 = {
    "num_kv_heads": 8,
    "context_length": 8192,
    "vocab_size": 128256,
    "rope": RoPE(500000.0),
    "eps": 1e-5,
}
_MIXTRAL = {"num_kv_heads": 8, "context_length": 32768, "rope": RoPE(1e6)}
_YARN = YaRNScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
_DEEPSEEK = {"context_length": 163840, "rope": RoPE(interleaved=True, scaling=_YARN)}

# Models that are known by name, as their makers published them.
MODELS: Mapping[str, tuple[type[LanguageModel], Any]] = MappingProxyType(
    {
        "gpt2": (GPT2, GPT2_CONFIGS["gpt2-small"]),
        "gpt2-xl": (GPT2, GPT2_CONFIGS["gpt2-xl"]),
        "llama3-8b": (Llama, LlamaConfig(4096, 14336, num_heads=32, num_layers=32, **_LLAMA3)),
        "llama3-70b": (Llama, LlamaConfig(8192, 28672, num_heads=64, num_layers=80, **_LLAMA3)),
        "mixtral-8x7b": (
            Mixtral,
            MixtralConfig(4096, 14336, num_heads=32, num_layers=32, **_MIXTRAL),
        ),
        "deepseek-v3": (
            DeepseekV3,
            DeepseekV3Config(7168, 18432, num_heads=128, num_layers=61, **_DEEPSEEK),
        ),
    }
)


# Fields of configs that name layers.
_LAYERS = ("full_layers", "dense_layers", "unrotated_layers")


@dataclass(frozen=True)
class Job:
    """What is planned.

    Args:
        name: name of the model.
        model: class of the model.
        config: config of the model.
        topology: chips and how they are joined.
        mesh: size of each axis of the mesh; together they are the number of devices.
        batch: number of sequences, on all chips together.
        tokens: number of tokens of each sequence; in generation, of the prompt and so of the cache.
        train: whether it is trained; else it generates.
        remat: whether the backward pass recomputes each block instead of storing its activations.
        dtype: dtype of the parameters and the computation; the optimizer works in float32.
        backend: backend of the attention calls; `"auto"` or the name of one.
        rules: lines of the table of axes that are replaced, see `flax_attn.sharding.rules`.

    Raises:
        ValueError: if the table has no line for a name, the mesh has an axis that the table does
            not, its product is not the number of devices, its axes do not divide the batch, the
            tokens, the heads or the experts, or there are more tokens than positions.

    Example:
        >>> from flax_attn.plan.topology import topology
        >>> chips, mesh = topology("v5e:4x4"), {"fsdp": 8, "tensor": 2}
        >>> Job("llama3-8b", *MODELS["llama3-8b"], chips, mesh, 8, 4096).axis("fsdp")
        8
    """

    name: str
    model: type[LanguageModel]
    config: Any
    topology: Topology
    mesh: Mapping[str, int]
    batch: int
    tokens: int
    train: bool = True
    remat: bool = False
    dtype: str = "bfloat16"
    backend: str = "auto"
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self):
        check_positive(batch=self.batch, tokens=self.tokens, **self.mesh)
        with self.table():
            self._check_mesh()
            self._check_divides("the batch", "batch", self.batch, "--batch or --mesh")
            self._check_divides(
                "the tokens of a sequence", "tokens", self.tokens, "--tokens or --mesh"
            )
            self._check_divides("the query heads", "heads", self.config.num_heads, "--mesh")
            experts = getattr(self.config, "num_experts", None)
            if experts is not None:
                self._check_divides("the experts", "expert", experts, "--mesh")
        # Rotary positions are computed for any length; embeddings are a table.
        limit = self.config.context_length
        if self.tokens > limit and not hasattr(self.config, "rope"):
            raise ValueError(
                f"{self.name} has an embedding for each of {limit} positions; got {self.tokens}"
                f" tokens. Plan {limit} tokens at most, or a model with rotary positions"
            )

    def axis(self, name: str) -> int:
        """Return the size of an axis of the mesh; 1 if the mesh does not have it."""
        return self.mesh.get(name, 1)

    def table(self) -> AbstractContextManager[None]:
        """Return what puts the rules of this job in use."""
        return rules(**self.rules)

    def build(self) -> Callable[..., LanguageModel]:
        """Return a function that makes the model from random streams.

        Its context is as long as the tokens at least. Layers are stacked where they are equal, and
        so compiled once.
        """
        length = max(self.config.context_length, self.tokens)
        config = replace(self.config, context_length=length)
        return partial(self._make, config)

    def _make(self, config: Any, rngs: Any) -> LanguageModel:
        options = {"param_dtype": self.dtype, "backend": self.backend, "remat": self.remat}
        with suppress(UnequalLayersError):
            return self.model(config, rngs=rngs, scan_layers=True, **options)
        return self.model(config, rngs=rngs, **options)

    def _check_mesh(self) -> None:
        known = sorted({axis for axes in table().values() for axis in axes})
        unknown = [axis for axis in self.mesh if axis not in known]
        if unknown:
            raise ValueError(
                f"the axes of a mesh are {', '.join(known)}; got {', '.join(unknown)}. Name it as"
                " one of these"
            )
        devices = prod(self.mesh.values())
        if devices != self.topology.size:
            raise ValueError(
                f"the axes of the mesh must multiply to the {self.topology.size} devices of"
                f" {self.topology.name}; got {_product(self.mesh)} = {devices}. Change --mesh or"
                " --topology"
            )

    def _check_divides(self, what: str, name: str, size: int, option: str) -> None:
        axes = {axis: self.axis(axis) for axis in table()[name] if self.axis(axis) > 1}
        if size % prod(axes.values()):
            raise ValueError(
                f"{what} must be divisible by {_product(axes)} of the mesh; got {size}. Change"
                f" {option}"
            )


def _product(axes: Mapping[str, int]) -> str:
    return " * ".join(f"{axis}={size}" for axis, size in axes.items())


def find_model(name: str) -> tuple[str, type[LanguageModel], Any]:
    """Return the name, the class and the config of a model.

    It is one of `MODELS`, or of a folder with a `config.json`.

    Raises:
        ValueError: if it is neither, or the config is that of a model which is not known.

    Example:
        >>> find_model("llama3-70b")[2].num_layers
        80
    """
    if name in MODELS:
        return name, *MODELS[name]
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"a model is one of {', '.join(MODELS)}, or a folder with a config.json; got {name!r},"
            " which is neither. Pass one of these names, or the path of a folder"
        )
    cls = _as_decoder(model_class(folder), folder)
    assert cls.family is not None, "models are registered with their family"
    return folder.absolute().name, cls, read_config(cls, cls.family, read_fields(folder))


def _as_decoder(cls: type, folder: Path) -> type[LanguageModel]:
    """Return a class of models if it is one that makes text."""
    if issubclass(cls, LanguageModel):
        return cls
    known = [family.__name__ for family in FAMILIES if issubclass(family, LanguageModel)]
    raise ValueError(
        f"plans are made for decoders; {folder} holds a {cls.__name__}. Pass one of"
        f" {', '.join(known)}"
    )


def first_layers(config: Any, count: int | None) -> Any:
    """Return a config with its first layers alone, or as it is for None.

    Raises:
        ValueError: if it has not so many.

    Example:
        >>> first_layers(MODELS["deepseek-v3"][1], 4).num_layers
        4
    """
    if count is None:
        return config
    # A model of more layers than there are would be another one.
    if count > config.num_layers:
        raise ValueError(
            f"the model has {config.num_layers} layers; got layers={count}. Pass as many at most"
        )
    kept = {
        name: tuple(i for i in getattr(config, name) if i < count)
        for name in _LAYERS
        if hasattr(config, name)
    }
    return replace(config, num_layers=count, **kept)


def parse_rules(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the lines of the table of axes in texts such as `embed=fsdp,context`.

    Nothing behind the sign is no axis.

    Raises:
        ValueError: if one is not written so.

    Example:
        >>> parse_rules(["embed=fsdp,context", "vocab="])
        {'embed': ('fsdp', 'context'), 'vocab': ()}
    """
    found = {}
    for text in texts:
        name, sign, axes = text.partition("=")
        if not sign or "=" in axes:
            raise ValueError(
                "a rule is written as the name of an axis and the axes of the mesh that it is split"
                f" over; got {text!r}. Write for example embed=fsdp,context"
            )
        found[name] = tuple(filter(None, axes.split(",")))
    return found


def parse_mesh(text: str) -> dict[str, int]:
    """Return the axes of a mesh that is written as `data=2,fsdp=4`.

    Raises:
        ValueError: if it is not written so, a size is below 1, or an axis comes twice.

    Example:
        >>> parse_mesh("data=2,fsdp=4")
        {'data': 2, 'fsdp': 4}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name or name in found or not _is_size(size):
            raise ValueError(
                f"a mesh is written as its axes and their sizes, each axis once; got {text!r}. "
                "Write for example data=2,fsdp=4, with sizes from 1"
            )
        found[name] = int(size)
    return found


def _is_size(text: str) -> bool:
    # Signs are no decimals; an axis of size 0 has no devices.
    return text.isdecimal() and int(text) > 0
