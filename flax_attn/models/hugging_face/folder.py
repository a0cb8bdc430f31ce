"""Models from Hugging Face folders, and back into them.

Nothing is downloaded: a folder holds `config.json` and the weights, as safetensors in one file or
in shards with an index, or as a PyTorch checkpoint. Everything is checked against the config and
against the headers of the files before the first weight is read; then one is read at a time, so
that memory holds the model once.
"""

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from attn_spec.checks import check_positive
from attn_spec.hugging_face.fields import Fields, read_fields
from flax_attn.convert.api import parameters, tensors
from flax_attn.convert.files import take_part, write_shards
from flax_attn.convert.headers import find_weights, read_headers
from flax_attn.convert.lock import locked
from flax_attn.models.hugging_face.copies import check_copies
from flax_attn.models.hugging_face.counts import check_counts
from flax_attn.models.hugging_face.entries import match, names_of, plan_entries
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.held import hold
from flax_attn.models.hugging_face.options import LoadOptions, check_float64, check_options
from flax_attn.models.hugging_face.quantized import dequantized, read_quantization
from flax_attn.models.hugging_face.reading import fill
from flax_attn.models.hugging_face.replacement import named_apart, replace_model
from flax_attn.models.hugging_face.streams import fork_streams
from flax_attn.models.hugging_face.values import Memory, OnMesh
from flax_attn.models.quantize import quantize
from flax_attn.modules.initialisation import without_values
from flax_attn.modules.quantized_linear import QuantizedLinear
from flax_attn.sharding.parameters import abstract, shard

M = TypeVar("M", bound=nnx.Module)


def load(
    cls: type[M], family: Family | None, path: str | PathLike[str], **options: Unpack[LoadOptions]
) -> M:
    """Return the model of a local folder in eval mode, an instance of `cls`.

    `family` says how it is stored.

    Raises:
        TypeError: if an option has another name.
        FileNotFoundError: if there is no such folder, or `config.json`, the weights or a shard is
            missing.
        ValueError: if the config is that of another model or asks for what ours do not compute, a
            file is damaged, or weights are missing, unexpected, mis-shaped or of an unknown dtype:
            all are listed, and none is read.
    """
    family = _known(cls, family)
    check_options(options)
    mesh, dtype = options.get("mesh"), options.get("param_dtype")
    fields = read_fields(Path(path))
    config: Any = read_config(cls, family, fields, options.get("dropout"))
    # After an interrupted save `config.json` says which files are the model.
    weights = find_weights(Path(path), fields.values.get("transformers_weights"))
    headers = read_headers(weights)
    stored = {_current(name): entry for name, entry in headers.items()}
    stored = dequantized(stored, fields, dtype)
    # Before a model is made of as many layers as the config says.
    check_counts(config, family, stored, weights)
    config = family.fit(config, stored)
    model = _abstract(cls, config, options)
    own = tensors(model)
    entries = match(model, own, family, stored, weights)
    check_copies(entries, family, stored, weights)
    # Without a `param_dtype` the files decide.
    if dtype is None:
        check_float64(stored[name].dtype for name in names_of(entries))
    fork_streams(model, options.get("rngs"))
    memory = Memory() if mesh is None else OnMesh(mesh)
    weights_in = options.get("weights")
    if weights_in == "stored":
        entries = hold(model, entries, stored, dtype, Memory())
    fill(own, entries, stored, dtype, options.get("progress"), memory)
    if mesh is not None:
        # What is left: the streams of dropout.
        shard(model, mesh)
    if weights_in == "int8":
        quantize(model, weights_in)
    model.eval()
    return model


def save(
    model: nnx.Module,
    config: Any,
    family: Family | None,
    path: str | PathLike[str],
    max_shard_size: int,
) -> None:
    """Write a model of this config, which `family` describes, as a folder that transformers loads.

    The weights are written under names that nothing reads. Then `config.json` is replaced by the
    new one, which names them; then they get their usual names as well; then `config.json` is
    replaced once more, by one that names none. So whenever it is killed or fails, the folder holds
    the old model or the new one.

    Raises:
        ValueError: if transformers has no model that computes the same, `max_shard_size` is not
            positive or the path is that of a file.
    """
    check_positive(max_shard_size=max_shard_size)
    target = Path(path).absolute()
    _check_savable(model, target)
    family = _known(type(model), family)
    params = tensors(model)
    dtypes = [param.dtype for param in parameters(model).values()]
    dtype = jnp.result_type(*dtypes).name
    fields = write_config(family, config, dtype)
    entries = plan_entries(model, params, family.layout)
    # The first process writes; the others help to gather what is split over all.
    if jax.process_index() > 0:
        take_part(entries, params)
    else:
        target.mkdir(parents=True, exist_ok=True)
        with locked(target) as alone, named_apart(target, alone) as prefix:
            weights = write_shards(target, entries, params, max_shard_size, prefix)
            replace_model(target, fields, prefix, weights)
    # None goes on before the folder is there.
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"{target} is written")


def _check_savable(model: nnx.Module, target: Path) -> None:
    """Raise unless a model can be written as a folder, before one is made."""
    name = type(model).__name__
    parts = [part for _, part in nnx.iter_modules(model)]
    quantized = any(isinstance(part, QuantizedLinear) for part in parts)
    if quantized:
        raise ValueError(
            f"save_pretrained writes weights as floats; got a {name} that is quantized. Save the"
            " model before quantize, or use flax_attn.convert.save"
        )
    if target.exists() and not target.is_dir():
        raise ValueError(f"a model is stored as a folder; got {target}, which is a file")


def read_config(cls: type, family: Family, fields: Fields, dropout: float | None = None) -> object:
    """Return the config of a model of `cls`; `dropout` replaces that of the file unless it is None.

    Files of transformers 4 and 5 are read. Every field by which transformers changes the function
    is supported or refused. It ignores all others, and they are ignored here.

    Raises:
        ValueError: if the file is that of another family, lacks a field, misspells one, or asks for
            what our models do not compute.
    """
    read = _reader(cls, family, fields)
    fields.only(is_causal=True)
    # Refused here as well, before the weights are looked for.
    read_quantization(fields)
    config = read(fields, dropout)
    fields.check_spelling()
    return config


def _reader(cls: type, family: Family, fields: Fields) -> Callable[..., object]:
    """Return the function that reads the fields of this model_type."""
    found = fields.text("model_type")
    read = family.read.get(found)
    if read is None:
        known = ", ".join(map(repr, family.read))
        name = cls.__name__
        raise ValueError(
            f"{fields.where} is that of a model_type {found!r}, and {name} reads {known}. Use"
            " flax_attn.models.from_pretrained, which chooses the class"
        )
    return read


def write_config(family: Family, config: Any, dtype: str) -> str:
    """Return the text of a `config.json` for transformers 4 and 5.

    `dtype` is that of the weights.

    Raises:
        ValueError: if the models of transformers cannot compute what the config says.
    """
    # The tokenizer has them, the model not.
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    # transformers 5 reads the first, and 4 the second.
    dtypes = {"dtype": dtype, "torch_dtype": dtype}
    fields = {**family.write(config), **ids, **dtypes}
    return json.dumps(fields, indent=2) + "\n"


def _known(cls: type, family: Family | None) -> Family:
    if family is None:
        raise ValueError(
            f"{cls.__name__} has no form in Hugging Face's transformers, its class sets no"
            " `family`. Use flax_attn.models.from_pretrained to load, or flax_attn.convert.save to"
            " store its weights"
        )
    return family


# Those of the options of loading that a model is built with.
_OF_MODELS = ("dtype", "precision", "backend", "remat", "scan_layers")


class _RepeatedKey(nnx.RngStream):
    """A stream that always returns its key.

    Counting the keys of a traced model takes time quadratic in its size.
    """

    def __call__(self) -> Array:
        return self.key[...]


def _abstract(cls: Callable[..., M], config: Any, options: Mapping[str, Any]) -> M:
    """Return a model that has shapes in the place of values."""
    own = {name: options[name] for name in _OF_MODELS if name in options}

    def build() -> M:
        rngs = nnx.Rngs(0)
        rngs.default = _RepeatedKey(0, tag="default")  # pyright: ignore[reportAttributeAccessIssue]
        return cls(config, rngs=rngs, **own)

    with without_values():
        return abstract(build)


def _current(name: str) -> str:
    """Return the current name of a weight: the first uploads named norms as TensorFlow does."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    return name.replace("LayerNorm.beta", "LayerNorm.bias")
