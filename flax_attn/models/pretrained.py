"""Models from Hugging Face folders, and back into them: `GPT2` and `Llama`, Mistral included.

Nothing is downloaded: a folder holds `config.json` and the weights, as safetensors in one file or in shards with an
index, or as a PyTorch checkpoint. All is checked against the config, and against the headers of the files, before the
first weight is read; then one is read at a time, so that memory holds the model once.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from rich.console import Console
from rich.progress import track

from flax_attn.convert.api import axes_of, parameters
from flax_attn.convert.files import Stored, find_weights, read_headers, write_shards
from flax_attn.convert.layouts import LAYOUTS
from flax_attn.convert.rules import ConversionError, Entry, plan, problems
from flax_attn.functional.checks import check_positive
from flax_attn.models.gpt2 import GPT2, GPT2Config
from flax_attn.models.hf_config import Config, read_config, write_config
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.llama import Llama
from flax_attn.modules.dropout import Dropout

_READ = ("float64", "float32", "float16", "bfloat16")


def from_pretrained(
    cls: Any,
    path: str | PathLike[str],
    *,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    backend: str = "auto",
    remat: bool = False,
    dropout: float | None = None,
    rngs: nnx.Rngs | None = None,
    progress: bool | None = None,
) -> LanguageModel:
    """Return the model of a local Hugging Face folder, in eval mode; `GPT2.from_pretrained(path)` for short.

    A head that is tied is read once, whatever the file holds. The context is `max_position_embeddings`; with dynamic
    RoPE scaling it is `factor` times that.

    Args:
        cls: `GPT2` or `Llama`, or `LanguageModel` for the one that `config.json` names.
        path: the folder.
        dtype: of the computation; None is that of the parameters.
        param_dtype: of the parameters; None is that of each weight in the files.
        precision: of the matrix products, as in `jax.lax.dot_general`.
        backend: of the attention calls; `"auto"` or the name of one.
        remat: whether the backward pass computes each block again instead of keeping what it made.
        dropout: the probability of dropout in train mode; None is that of `config.json`.
        rngs: random streams that dropout draws its keys from; None is `nnx.Rngs(0)`.
        progress: whether to show a bar on stderr; None is where that is a terminal.

    Raises:
        FileNotFoundError: if there is no such folder, or `config.json`, the weights or a shard is missing.
        ValueError: if the config is that of another model or asks for what ours do not compute, a file is damaged, or
            weights are missing, unexpected, mis-shaped or of an unknown dtype: all are listed, and none is read.

    Example:
        >>> import tempfile
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     GPT2.from_pretrained(folder).config == model.config
        True
    """
    folder = Path(path)
    config = read_config(folder, dropout=dropout)
    cls = _class_for(cls, config, folder)
    weights = find_weights(folder)
    stored = read_headers(weights)
    options = {"dtype": dtype, "precision": precision, "backend": backend, "remat": remat}
    model = _of_shapes(cls, config, options)
    entries = _match(model, stored, weights)
    _check_dtypes([stored[entry.theirs].dtype for entry in entries] if param_dtype is None else [param_dtype])
    _fork_streams(model, nnx.Rngs(0) if rngs is None else rngs)
    _fill(model, entries, stored, param_dtype, sys.stderr.isatty() if progress is None else progress)
    model.eval()
    return model


def save_pretrained(model: LanguageModel, path: str | PathLike[str], *, max_shard_size: int = 4 * 10**9) -> None:
    """Write a model as a Hugging Face folder that transformers loads, bit for bit; `model.save_pretrained(path)`.

    A `Llama` with a window is stored as Mistral. What else a folder holds stays, such as the files of a tokenizer.
    All is written beside the folder and then moved into it, `config.json` last: without that, nothing loads.

    Args:
        model: a `GPT2` or `Llama`.
        path: the folder; made if there is none.
        max_shard_size: bytes of weights in one file; no more is in memory a second time.

    Raises:
        ValueError: if transformers has no model that computes the same, `max_shard_size` is not positive or the path is
            that of a file.

    Example:
        >>> import tempfile
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(model, folder)
        ...     sorted(file.name for file in Path(folder).iterdir())
        ['config.json', 'model.safetensors']
    """
    check_positive(max_shard_size=max_shard_size)
    if not isinstance(model, GPT2 | Llama):
        raise ValueError(f"transformers knows GPT2 and Llama; got {type(model).__name__}. Use flax_attn.convert.save")
    target = Path(path).absolute()
    if target.exists() and not target.is_dir():
        raise ValueError(f"a model is stored as a folder; got {target}, which is a file")
    params = {name: param[...] for name, param in parameters(model).items()}
    entries = _plan(model)
    config = write_config(model.config, jnp.result_type(*params.values()).name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        write_shards(Path(temporary), entries, params, max_shard_size)
        Path(temporary, "config.json").write_text(config, encoding="utf-8")
        _move(Path(temporary), target)


def _class_for(cls: Any, config: Config, folder: Path) -> Any:
    right = GPT2 if isinstance(config, GPT2Config) else Llama
    if cls is LanguageModel:
        return right
    if not issubclass(cls, right):
        name = right.__name__
        raise ValueError(f"{folder / 'config.json'} is that of a {name}, not of a {cls.__name__}. Take {name}")
    return cls


def _of_shapes(cls: Any, config: Config, options: Mapping[str, Any]) -> LanguageModel:
    """Return a model that has shapes in the place of values."""
    # Its blocks are alike, and one of them is traced: the time to trace many grows with the square of their number.
    model = nnx.eval_shape(lambda: cls(replace(config, num_layers=1), rngs=nnx.Rngs(0), **options))
    model.config = config
    model.trf_blocks = nnx.List(nnx.clone(model.trf_blocks[0]) for _ in range(config.num_layers))
    return model


def _plan(model: LanguageModel) -> list[Entry]:
    shapes = {name: param.shape for name, param in parameters(model).items()}
    entries = plan(shapes, LAYOUTS[_layout(model)], axes_of(model, _layout(model)))
    return sorted(entries, key=lambda entry: entry.theirs)


def _layout(model: LanguageModel) -> str:
    return "hf_gpt2" if isinstance(model, GPT2) else "hf_llama"


def _match(model: LanguageModel, stored: Mapping[str, Stored], weights: Path) -> list[Entry]:
    """Return the entries of a model by their names in the files, or raise with all that is wrong."""
    entries = _named_as_in(stored, _plan(model), "transformer." if isinstance(model, GPT2) else "model.")
    wrong = problems(entries, {name: entry.shape for name, entry in stored.items()}, LAYOUTS[_layout(model)])
    held = {entry.theirs: stored[entry.theirs].dtype for entry in entries if entry.theirs in stored}
    wrong += [f"not readable {name}: its dtype is {dtype}" for name, dtype in held.items() if dtype not in _READ]
    if wrong:
        heading = f"{weights} does not hold the weights of the {type(model).__name__} that config.json describes:"
        raise ConversionError("\n  ".join([heading, *wrong]))
    return entries


def _named_as_in(names: Iterable[str], entries: list[Entry], base: str) -> list[Entry]:
    """Return the entries under the prefix that the table of the tokens has among these names.

    Models were also stored without their head, and their names then lack the base, or from within another module.
    """
    table = next(entry.theirs for entry in entries if entry.ours[0] == "tok_emb.embedding").removeprefix(base)
    start = next((name.removesuffix(table) for name in names if name.endswith(table)), base)
    outer = start.removesuffix(base)

    def place(name: str) -> str:
        return start + name.removeprefix(base) if name.startswith(base) else outer + name

    return [replace(entry, theirs=place(entry.theirs)) for entry in entries]


def _check_dtypes(dtypes: Iterable[Dtype]) -> None:
    for given in dtypes:
        dtype = jnp.dtype(given)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"param_dtype must be floating point; got {dtype}. Pass jnp.bfloat16, or None for the file's"
            )
        if dtype == jnp.float64 and jnp.result_type(float) != jnp.float64:
            raise ValueError(
                "parameters in float64 need JAX in its mode of 64 bits; got a param_dtype or weights of float64. "
                'Pass param_dtype=jnp.float32 or call jax.config.update("jax_enable_x64", True)'
            )


def _fork_streams(model: LanguageModel, rngs: nnx.Rngs) -> None:
    """Give each dropout a stream of its own: all that a model holds beside parameters."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Dropout) and module.stream is not None:
            module.stream = nnx.data(rngs.dropout.fork())


def _fill(
    model: LanguageModel, entries: list[Entry], stored: Mapping[str, Stored], dtype: Dtype | None, progress: bool
) -> None:
    """Read the weights, the largest first: while its copies are made, the others take no memory yet."""
    params = parameters(model)
    largest_first = sorted(entries, key=lambda entry: -math.prod(entry.shape))
    for entry in track(largest_first, "weights", console=Console(stderr=True), disable=not progress):
        for name, array in _ours(entry, stored[entry.theirs].read()).items():
            params[name].set_value(jnp.asarray(array, array.dtype if dtype is None else dtype))


def _ours(entry: Entry, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parameters of an entry, without a copy where it is one of them as it stands."""
    as_it_stands = len(entry.ours) == 1 and not entry.rule.pattern
    return {entry.ours[0]: array} if as_it_stands else entry.split(array)


def _move(source: Path, target: Path) -> None:
    """Move a model into a folder, in the place of one that is there; its config comes last."""
    target.mkdir(exist_ok=True)
    for pattern in ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"):
        for stale in target.glob(pattern):
            stale.unlink()
    for file in sorted(source.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(target / file.name)
