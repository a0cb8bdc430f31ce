"""The models that a plan is made for: published decoders, and modules of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from attn_spec.frequencies import YaRNScaling
from attn_spec.hugging_face.fields import read_fields
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.positions import RoPE
from flax_attn.models.deepseekv3 import DeepseekV3, DeepseekV3Config
from flax_attn.models.gpt2 import GPT2, GPT2_CONFIGS
from flax_attn.models.hugging_face.folder import read_config
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.layer_pattern import UnequalLayersError
from flax_attn.models.llama import Llama, LlamaConfig
from flax_attn.models.loss import next_token_loss
from flax_attn.models.mixtral import Mixtral, MixtralConfig
from flax_attn.models.registry import FAMILIES, model_class
from flax_attn.modules.work import Work, work
from flax_attn.plan.traced_work import traced_work
from flax_attn.sharding.axes import table

if TYPE_CHECKING:
    from flax_attn.plan.job import Job

# Fields of configs that name layers.
_LAYERS = ("full_layers", "dense_layers", "unrotated_layers")


@runtime_checkable
class PlannedModel(Protocol):
    """What a plan asks of a model."""

    @property
    def has_remat(self) -> bool:
        """Whether the model can be built so that its backward pass recomputes each block."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the parameters where a job names none, in words."""
        ...

    @property
    def loss(self) -> Callable[[Any, Any], Array]:
        """A function of the model and the tokens of a batch, which returns the loss."""
        ...

    @property
    def divided(self) -> Mapping[str, tuple[str, int]]:
        """The name of the axis and the size of each thing that the mesh has to divide."""
        ...

    def check(self, job: Job) -> None:
        """Raise a ValueError, with the remedy, for a job that the model cannot be used in."""
        ...

    def build(self, job: Job) -> Callable[[nnx.Rngs], nnx.Module]:
        """Return a function that makes the model from random streams."""
        ...

    def forward_work(self, job: Job, model: nnx.Module) -> Work:
        """Return the operations of a forward pass over the batch, on all devices together."""
        ...

    def activations(self, job: Job) -> float:
        """Return how many numbers of a token a device keeps, up to a factor."""
        ...


@dataclass(frozen=True)
class LibraryModel:
    """A decoder of this library.

    Args:
        cls: class of the model.
        config: config of the model.

    Example:
        >>> MODELS["llama3-8b"].first_layers(2).config.num_layers
        2
    """

    cls: type[LanguageModel]
    config: Any

    has_remat = True
    dtype = "bfloat16"
    loss = staticmethod(next_token_loss)

    @property
    def divided(self) -> dict[str, tuple[str, int]]:
        """The query heads, and the experts of a mixture."""
        found = {"the query heads": ("heads", self.config.num_heads)}
        experts = getattr(self.config, "num_experts", None)
        if experts is not None:
            found["the experts"] = ("expert", experts)
        return found

    def first_layers(self, count: int | None) -> LibraryModel:
        """Return the model with its first layers only, or as it is for None.

        Raises:
            ValueError: if it has not so many.
        """
        if count is None:
            return self
        # A model of more layers than there are would be another one.
        if count > self.config.num_layers:
            raise ValueError(
                f"the model has {self.config.num_layers} layers; got layers={count}. Pass as many"
                " at most"
            )
        kept = {}
        for name in _LAYERS:
            if hasattr(self.config, name):
                layers = getattr(self.config, name)
                kept[name] = tuple(i for i in layers if i < count)
        return LibraryModel(self.cls, replace(self.config, num_layers=count, **kept))

    def check(self, job: Job) -> None:
        """Raise a ValueError for an axis of the mesh that is not known, or too many tokens."""
        known = {axis for axes in table().values() for axis in axes}
        unknown = [axis for axis in job.mesh if axis not in known]
        if unknown:
            names = ", ".join(sorted(known))
            got = ", ".join(unknown)
            raise ValueError(f"the axes of a mesh are {names}; got {got}. Name it as one of these")
        # Rotary positions are computed for any length; embeddings are a table.
        limit = self.config.context_length
        is_rotary = hasattr(self.config, "rope")
        if job.tokens > limit and not is_rotary:
            raise ValueError(
                f"{job.name} has an embedding for each of {limit} positions; got {job.tokens}"
                f" tokens. Plan {limit} tokens at most, or a model with rotary positions"
            )

    def build(self, job: Job) -> Callable[[nnx.Rngs], LanguageModel]:
        """Return a function that makes the model, whose context is as long as the tokens at least.

        Layers are stacked where they are equal, and so compiled once.
        """
        limit = self.config.context_length
        length = max(limit, job.tokens)
        config = replace(self.config, context_length=length)
        dtype = job.dtype or self.dtype
        options = {
            "param_dtype": dtype,
            "backend": job.backend,
            "remat": job.remat,
        }
        return partial(self._make, config, options)

    def _make(self, config: Any, options: dict[str, Any], rngs: nnx.Rngs) -> LanguageModel:
        with suppress(UnequalLayersError):
            return self.cls(config, rngs=rngs, scan_layers=True, **options)
        return self.cls(config, rngs=rngs, **options)

    def forward_work(self, job: Job, model: nnx.Module) -> Work:
        """Return what the modules say of themselves."""
        return job.batch * work(model, job.tokens, job.tokens)

    def activations(self, job: Job) -> float:
        """Return how many numbers of a token a device keeps, up to a factor."""
        layer = self._activations_of_layer(job)
        if not job.train:
            return layer
        # Recomputed, a block keeps its input only.
        kept = self.config.d_model if job.remat else layer
        return layer + self.config.num_layers * kept

    def _activations_of_layer(self, job: Job) -> float:
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.d_model // config.num_heads
        kv_heads = getattr(config, "num_kv_heads", None) or config.num_heads
        split = (config.num_heads + 2 * kv_heads) * head_dim + 3 * _hidden(config)
        return 4 * config.d_model + split / job.axis("tensor")


def _hidden(config: Any) -> int:
    """Return the hidden features of a token in the feed-forward layer, or in all of its experts."""
    if hasattr(config, "num_experts"):
        return config.top_k * getattr(config, "d_expert", config.d_hidden)
    return config.d_hidden or 4 * config.d_model


def logits_loss(model: Any, tokens: Array) -> Array:
    """Return the mean cross entropy of the next tokens, of a module that returns all logits.

    Raises:
        ValueError: if the module does not return logits of each token.
    """
    logits = model(tokens)
    shape = getattr(logits, "shape", ())
    b, t = tokens.shape
    if len(shape) != 3 or shape[:2] != (b, t):
        got = f"shape {shape}" if shape else f"a {type(logits).__name__}"
        raise ValueError(
            f"a model that is planned maps ids ({b}, {t}) to logits ({b}, {t}, vocabulary); got"
            f" {got}. Name a function that makes a module which returns logits"
        )
    predicted = logits[:, :-1].astype(accumulation_dtype(logits.dtype))
    losses = optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:])
    return losses.mean()


@dataclass(frozen=True)
class OwnModel:
    """A module of your own that maps ids of tokens `(b, t)` to logits `(b, t, vocabulary)`.

    Args:
        make: function without arguments that makes the module.
    """

    make: Callable[[], nnx.Module]

    has_remat = False
    dtype = "its own dtypes"
    loss = staticmethod(logits_loss)

    @property
    def divided(self) -> dict[str, tuple[str, int]]:
        """Nothing that is known: its parameters name their axes themselves."""
        return {}

    def check(self, job: Job) -> None:
        """Raise a ValueError for what only the code of the module can change."""
        # These reach our own models as arguments of their classes.
        given = []
        if job.remat:
            given.append("--remat")
        if job.dtype is not None:
            given.append("--dtype")
        if job.backend != "auto":
            given.append("--backend")
        if given:
            raise ValueError(
                f"models of this library take {', '.join(given)}; {job.name} is a module of your"
                " own. Set that in the function that makes it, and leave the option out"
            )
        if not job.train:
            raise ValueError(
                f"generation is planned for decoders of this library; {job.name} is a module of"
                " your own. Plan its training, with --train"
            )

    def build(self, job: Job) -> Callable[[nnx.Rngs], nnx.Module]:
        """Return a function that makes the module."""
        return lambda rngs: self.make()

    def forward_work(self, job: Job, model: nnx.Module) -> Work:
        """Return what its traced program computes: it may call attention as a function."""
        graph, state = nnx.split(model)

        def loss(state: Any, tokens: Array) -> Array:
            return self.loss(nnx.merge(graph, state), tokens)

        tokens = jax.ShapeDtypeStruct((job.batch, job.tokens), jnp.int32)
        return traced_work(loss, state, tokens)

    def activations(self, job: Job) -> float:
        """Return 1: what a token keeps does not change with the mesh."""
        return 1.0


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

_LLAMA3_8B = LlamaConfig(4096, 14336, num_heads=32, num_layers=32, **_LLAMA3)
_LLAMA3_70B = LlamaConfig(8192, 28672, num_heads=64, num_layers=80, **_LLAMA3)
_MIXTRAL_8X7B = MixtralConfig(4096, 14336, num_heads=32, num_layers=32, **_MIXTRAL)
_DEEPSEEK_V3 = DeepseekV3Config(7168, 18432, num_heads=128, num_layers=61, **_DEEPSEEK)

# Models that are known by name, as their makers published them.
MODELS: Mapping[str, LibraryModel] = MappingProxyType(
    {
        "gpt2": LibraryModel(GPT2, GPT2_CONFIGS["gpt2-small"]),
        "gpt2-xl": LibraryModel(GPT2, GPT2_CONFIGS["gpt2-xl"]),
        "llama3-8b": LibraryModel(Llama, _LLAMA3_8B),
        "llama3-70b": LibraryModel(Llama, _LLAMA3_70B),
        "mixtral-8x7b": LibraryModel(Mixtral, _MIXTRAL_8X7B),
        "deepseek-v3": LibraryModel(DeepseekV3, _DEEPSEEK_V3),
    }
)


def find_decoder(name: str) -> tuple[str, LibraryModel]:
    """Return the name of a model and the model: one of `MODELS`, or of a folder with a config.

    Raises:
        ValueError: if it is neither, or the config is that of a model which is not known.

    Example:
        >>> find_decoder("llama3-70b")[1].config.num_layers
        80
    """
    if name in MODELS:
        return name, MODELS[name]
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"a model is one of {', '.join(MODELS)}, a folder with a config.json, or a function"
            f" that makes a module, FILE.py:NAME; got {name!r}, which is none of them. Pass one of"
            " these names, or the path of a folder"
        )
    cls = model_class(folder)
    if not issubclass(cls, LanguageModel):
        known = [family.__name__ for family in FAMILIES if issubclass(family, LanguageModel)]
        raise ValueError(
            f"plans are made for decoders; {folder} holds a {cls.__name__}. Pass one of"
            f" {', '.join(known)}"
        )
    assert cls.family is not None, "models are registered with their family"
    return folder.absolute().name, LibraryModel(
        cls, read_config(cls, cls.family, read_fields(folder))
    )
