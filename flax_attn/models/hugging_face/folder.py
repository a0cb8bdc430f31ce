"""Models from Hugging Face folders, and back into them.

Nothing is downloaded: a folder holds `config.json` and the weights, as safetensors in one file or
in shards with an index, or as a PyTorch checkpoint. Everything is checked against the config and
against the headers of the files before the first weight is read; then one is read at a time, so
that memory holds the model once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from attn_spec.checks import DTYPES, check_choice, check_positive
from attn_spec.hugging_face.fields import Fields, read_fields
from flax_attn.convert.api import axes_of, parameters, tensors
from flax_attn.convert.files import take_part, write_shards
from flax_attn.convert.headers import Stored, find_weights, read_headers
from flax_attn.convert.lock import locked
from flax_attn.convert.planning import plan
from flax_attn.convert.problems import problems
from flax_attn.convert.rules import ConversionError, Entry, Layout
from flax_attn.convert.stacked import LayerSlice, Tensor, whole
from flax_attn.models.hugging_face.copies import check_copies
from flax_attn.models.hugging_face.counts import check_counts
from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.quantized import dequantized, read_quantization
from flax_attn.models.hugging_face.replacement import named_apart, replace_model
from flax_attn.models.hugging_face.streams import fork_streams
from flax_attn.models.hugging_face.values import Memory, OnMesh
from flax_attn.models.quantize import WEIGHTS, quantize
from flax_attn.modules.initialisation import check_dtypes
from flax_attn.modules.quantized_linear import QuantizedLinear
from flax_attn.sharding.parameter_axes import check_mesh
from flax_attn.sharding.parameters import abstract, shard

M = TypeVar("M", bound=nnx.Module)


class LoadOptions(TypedDict, total=False):
    """The options of `from_pretrained`."""

    dtype: Dtype | None
    param_dtype: Dtype | None
    precision: PrecisionLike
    backend: str
    remat: bool
    scan_layers: bool
    dropout: float | None
    rngs: nnx.Rngs | None
    progress: bool | None
    mesh: Mesh | None
    weights: Literal["int8"] | None


def load(
    cls: type[M], family: Family | None, path: str | PathLike[str], **options: Unpack[LoadOptions]
) -> M:
    """Return the model of a local folder in eval mode, an instance of `cls`.

    `family` says how it is stored.

    Raises:
        FileNotFoundError: if there is no such folder, or `config.json`, the weights or a shard is
            missing.
        ValueError: if the config is that of another model or asks for what ours do not compute, a
            file is damaged, or weights are missing, unexpected, mis-shaped or of an unknown dtype:
            all are listed, and none is read.
    """
    family, folder, mesh = _known(cls, family), Path(path), options.get("mesh")
    weights_in = options.get("weights")
    if weights_in is not None:
        _check_quantized(weights_in, mesh, options.get("scan_layers", False))
    if mesh is not None:
        check_mesh(mesh)
    dtype = options.get("param_dtype")
    check_dtypes(dtype=options.get("dtype"), param_dtype=dtype)
    _check_float64([] if dtype is None else [dtype])
    fields = read_fields(folder)
    config: Any = read_config(cls, family, fields, options.get("dropout"))
    weights = find_weights(folder, fields.values.get("transformers_weights"))
    stored = {_current(name): entry for name, entry in read_headers(weights).items()}
    stored = dequantized(stored, fields, dtype)
    check_counts(config, family, stored, weights)
    config = family.fit(config, stored)
    model = _abstract(
        cls, config, {name: value for name, value in options.items() if name in _OF_MODELS}
    )
    own = tensors(model)
    entries = _match(model, own, family, stored, weights)
    check_copies(entries, family, stored, weights)
    rngs, progress = options.get("rngs"), options.get("progress")
    if dtype is None:
        _check_float64(stored[name].dtype for entry in entries for name in entry.tensors)
    fork_streams(model, rngs)
    memory = Memory() if mesh is None else OnMesh(mesh)
    shown = sys.stderr.isatty() if progress is None else progress
    _fill(own, entries, stored, dtype, shown, memory)
    if mesh is not None:
        shard(model, mesh)  # what is left: the streams of dropout
    if weights_in is not None:
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
    if any(isinstance(part, QuantizedLinear) for _, part in nnx.iter_modules(model)):
        raise ValueError(
            f"save_pretrained writes weights as floats; got a {type(model).__name__} that is"
            " quantized. Save the model before quantize, or use flax_attn.convert.save"
        )
    family, target = _known(type(model), family), Path(path).absolute()
    if target.exists() and not target.is_dir():
        raise ValueError(f"a model is stored as a folder; got {target}, which is a file")
    params = tensors(model)
    dtypes = (param.dtype for param in parameters(model).values())
    fields = write_config(family, config, jnp.result_type(*dtypes).name)
    entries = _plan(model, params, family.layout)
    if jax.process_index() > 0:
        take_part(entries, params)
    else:
        target.mkdir(parents=True, exist_ok=True)
        with locked(target) as alone, named_apart(target, alone) as prefix:
            weights = write_shards(target, entries, params, max_shard_size, prefix)
            replace_model(target, fields, prefix, weights)
    if jax.process_count() > 1:  # none goes on before the folder is there
        multihost_utils.sync_global_devices(f"{target} is written")


def _check_quantized(weights: str, mesh: Mesh | None, scan_layers: bool) -> None:
    check_choice("weights", weights, WEIGHTS)
    if mesh is not None or scan_layers:
        given = "scan_layers" if mesh is None else "a mesh"
        raise ValueError(
            f'weights="{weights}" is for layers one by one on one device; got {given}. Load without'
            " one of the two"
        )


def read_config(cls: type, family: Family, fields: Fields, dropout: float | None = None) -> object:
    """Return the config of a model of `cls`; `dropout` replaces that of the file unless it is None.

    Files of transformers 4 and 5 are read. Every field that changes the function is supported or
    refused.

    Raises:
        ValueError: if the file is that of another family, lacks a field, or asks for what our
            models do not compute.
    """
    found = fields.text("model_type")
    if found not in family.read:
        raise ValueError(
            f"{fields.where} is that of a model_type {found!r}, and {cls.__name__} reads"
            f" {', '.join(map(repr, family.read))}. Use flax_attn.models.from_pretrained, which"
            " chooses the class"
        )
    fields.only(is_causal=True)
    read_quantization(fields)
    return family.read[found](fields, dropout)


def write_config(family: Family, config: Any, dtype: str) -> str:
    """Return the text of a `config.json` for transformers 4 and 5.

    `dtype` is that of the weights.

    Raises:
        ValueError: if the models of transformers cannot compute what the config says.
    """
    ids = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }  # the tokenizer has them, the model not
    return (
        json.dumps({**family.write(config), **ids, "dtype": dtype, "torch_dtype": dtype}, indent=2)
        + "\n"
    )


def _known(cls: type, family: Family | None) -> Family:
    if family is None:
        raise ValueError(
            f"{cls.__name__} has no form in Hugging Face's transformers, its class sets no"
            " `family`. Use flax_attn.models.from_pretrained to load, or flax_attn.convert.save to"
            " store its weights"
        )
    return family


_OF_MODELS = ("dtype", "precision", "backend", "remat", "scan_layers")


class _RepeatedKey(nnx.RngStream):
    """A stream that always returns its key.

    Counting the keys of a traced model takes time quadratic in its size.
    """

    def __call__(self) -> Array:
        return self.key[...]


def _abstract(cls: Callable[..., M], config: Any, options: Mapping[str, Any]) -> M:
    """Return a model that has shapes in the place of values."""

    def build() -> M:
        rngs = nnx.Rngs(0)
        rngs.default = _RepeatedKey(0, tag="default")  # pyright: ignore[reportAttributeAccessIssue]
        return cls(config, rngs=rngs, **options)

    return abstract(build)


def _current(name: str) -> str:
    """Return the current name of a weight: the first uploads named norms as TensorFlow does."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def _plan(model: nnx.Module, own: Mapping[str, Tensor], layout: Layout) -> list[Entry]:
    shapes = {name: tensor.shape for name, tensor in own.items()}
    entries = plan(shapes, layout, axes_of(model, layout))
    return sorted(entries, key=lambda entry: entry.theirs)


def _match(
    model: nnx.Module,
    own: Mapping[str, Tensor],
    family: Family,
    stored: Mapping[str, Stored],
    weights: Path,
) -> list[Entry]:
    """Return the entries of a model by their names in the files, or raise with all that is wrong.

    Of the layouts of the family it is the one that has the fewest names that are not there.
    """
    plans = [
        (layout, _named_as_in(stored, _plan(model, own, layout), family))
        for layout in (family.layout, *family.others)
    ]
    layout, entries = min(plans, key=lambda plan: len(_names(plan[1]) - stored.keys()))
    wrong = problems(entries, {name: entry.shape for name, entry in stored.items()}, layout)
    dtypes = {name: stored[name].dtype for name in sorted(_names(entries) & stored.keys())}
    wrong += [
        f"not readable {name}: its dtype is {dtype}"
        for name, dtype in dtypes.items()
        if dtype not in DTYPES
    ]
    if wrong:
        heading = (
            f"{weights} does not hold the weights of the {type(model).__name__} that config.json"
            " describes:"
        )
        raise ConversionError("\n  ".join([heading, *wrong]))
    return entries


def _names(entries: list[Entry]) -> set[str]:
    return {name for entry in entries for name in entry.tensors}


def _named_as_in(names: Iterable[str], entries: list[Entry], family: Family) -> list[Entry]:
    """Return the entries under the prefix that the anchor of the family has among these names.

    Files of a model without its head lack the base, and those of a model inside another module have
    a longer prefix.
    """
    base = family.base
    anchored = next(entry for entry in entries if family.anchor in entry.ours)
    anchor = anchored.theirs.removeprefix(base)
    starts = (name.removesuffix(anchor) for name in names if name.endswith(anchor))
    start = next(starts, base)
    outer = start.removesuffix(base)

    def place(name: str) -> str:
        return start + name.removeprefix(base) if name.startswith(base) else outer + name

    return [replace(entry, theirs=place(entry.theirs)) for entry in entries]


def _check_float64(dtypes: Iterable[Dtype]) -> None:
    for dtype in dtypes:
        if jnp.dtype(dtype) == jnp.float64 and jnp.result_type(float) != jnp.float64:
            raise ValueError(
                "parameters in float64 need JAX's 64-bit mode; got a param_dtype or weights of"
                ' float64. Pass param_dtype=jnp.float32 or call jax.config.update("jax_enable_x64",'
                " True)"
            )


def _fill(
    own: Mapping[str, Tensor],
    entries: list[Entry],
    stored: Mapping[str, Stored],
    dtype: Dtype | None,
    progress: bool,
    memory: Memory | OnMesh,
) -> None:
    """Read the weights, the largest first: its copies are made while memory is free."""
    groups = sorted(_by_variables(entries, own), key=_size, reverse=True)
    for group in _shown(groups) if progress else groups:
        mapped = {}
        for entry in group:
            mapped |= _read(entry, stored)
        for variable, layers in whole(own, mapped):
            arrays = [array for parts in layers for array in parts]
            # Statistics keep their dtype.
            kept = dtype is None or not isinstance(variable, nnx.Param)
            wanted = jnp.dtype(arrays[0].dtype if kept else dtype)
            variable.set_value(memory.copy(arrays, variable, wanted))


def _size(group: list[Entry]) -> int:
    return sum(math.prod(entry.shape) for entry in group)


def _read(entry: Entry, stored: Mapping[str, Stored]) -> dict[str, list[np.ndarray]]:
    """Return the parts of an entry: each parameter whole, or in the pieces that it is stored in."""
    if "*" not in entry.theirs:
        return {name: [part] for name, part in entry.parts(stored[entry.theirs].read()).items()}
    single = replace(entry, shapes=tuple((1, *shape[1:]) for shape in entry.shapes))
    pieces = [single.parts(stored[name].read()[None]) for name in entry.tensors]
    return {name: [piece[name][0] for piece in pieces] for name in entry.ours}


def _shown(groups: list[list[Entry]]) -> Iterable[list[Entry]]:
    """Yield the groups, under a bar on stderr."""
    from rich.console import Console
    from rich.progress import track

    return track(groups, "weights", console=Console(stderr=True))


def _by_variables(entries: list[Entry], tensors: Mapping[str, Tensor]) -> Iterable[list[Entry]]:
    """Return the entries that are of the same variables together: those of stacked layers."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        own = (tensors[name] for name in entry.ours)
        key = tuple(
            id(tensor.variable if isinstance(tensor, LayerSlice) else tensor) for tensor in own
        )
        groups.setdefault(key, []).append(entry)
    return groups.values()
