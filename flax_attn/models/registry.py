"""The families of models. A new one is a line here."""

from os import PathLike
from pathlib import Path
from typing import Any, Unpack

from flax_attn.models.gpt2 import GPT2
from flax_attn.models.hugging_face.fields import read_fields
from flax_attn.models.hugging_face.folder import LoadOptions
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.llama import Llama
from flax_attn.models.qwen2 import Qwen2
from flax_attn.models.qwen3 import Qwen3

FAMILIES: tuple[type[LanguageModel[Any]], ...] = (
    GPT2,
    Llama,
    Qwen2,
    Qwen3,
)


def model_types() -> dict[str, type[LanguageModel[Any]]]:
    """Return the class of each `model_type` that `config.json` may name.

    Example:
        >>> model_types()["mistral"].__name__
        'Llama'
    """
    return {name: cls for cls in FAMILIES if cls.family for name in cls.family.read}


def model_class(path: str | PathLike[str]) -> type[LanguageModel[Any]]:
    """Return the class of the model in a Hugging Face folder, by its `config.json`.

    Raises:
        FileNotFoundError: if there is no such folder or file.
        ValueError: if the file is not JSON or of a family that is not known; the message lists those that are.
    """
    return read_fields(Path(path)).choose("model_type", model_types())


def from_pretrained(path: str | PathLike[str], **options: Unpack[LoadOptions]) -> LanguageModel[Any]:
    """Return the model of a local Hugging Face folder, in eval mode, of the class that its `config.json` names.

    `Llama.from_pretrained(path)` is the same for a folder that is known to hold a `Llama`. A head that is tied is read
    once, whatever the file holds. The context is `max_position_embeddings`; with dynamic RoPE scaling it is `factor`
    times that.

    Args:
        path: the folder.
        dtype: of the computation; None is that of the parameters.
        param_dtype: of the parameters; None is that of each weight in the files.
        precision: of the matrix products, as in `jax.lax.dot_general`.
        backend: of the attention calls; `"auto"` or the name of one.
        remat: whether the backward pass recomputes each block instead of storing its activations.
        scan_layers: whether the parameters of the blocks are stacked, and the blocks run by one scan: compiled once.
        dropout: the probability of dropout in train mode; None is that of `config.json`.
        rngs: random streams from which dropout draws its keys; None is `nnx.Rngs(0)`.
        progress: whether to show a bar on stderr; None is where that is a terminal.
        mesh: that the parameters are split over, as `flax_attn.sharding.shardings` says: a process reads the parts of
            its devices alone. A PyTorch checkpoint is read as a whole. None is the default device.

    Raises:
        FileNotFoundError: if there is no such folder, or `config.json`, the weights or a shard is missing.
        ValueError: if the family is not known, the config asks for what ours does not compute, a file is damaged, or
            weights are missing, unexpected, mis-shaped or of an unknown dtype: all are listed, and none is read. Also
            if the mesh has no axis of the table.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from flax_attn import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(model, folder)
        ...     from_pretrained(folder).config == model.config
        True
    """
    return model_class(path).from_pretrained(path, **options)


def save_pretrained(model: LanguageModel[Any], path: str | PathLike[str], *, max_shard_size: int = 4 * 10**9) -> None:
    """Write a model as a Hugging Face folder that transformers loads, bit for bit; `model.save_pretrained(path)`.

    A `Llama` with a window is stored as Mistral. Other files of the folder stay, such as those of a tokenizer.
    All is written beside the folder and then moved into it, `config.json` last: without that, nothing loads. Of a model
    on a mesh the weights are gathered one by one. Of several processes each must call this: the first one writes.

    Args:
        model: of one of the families.
        path: the folder; made if there is none.
        max_shard_size: bytes of weights in one file; no more is in memory a second time.

    Raises:
        ValueError: if transformers has no model that computes the same, `max_shard_size` is not positive or the path is
            that of a file.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from flax_attn import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(model, folder)
        ...     sorted(file.name for file in Path(folder).iterdir())
        ['config.json', 'model.safetensors']
    """
    model.save_pretrained(path, max_shard_size=max_shard_size)
