"""The families of models. A new one is a line here.

Only in flax_attn: PyTorch has transformers.
"""

from os import PathLike
from pathlib import Path
from typing import Unpack

from attn_spec.checks import check_type, nearest
from attn_spec.hugging_face.fields import Fields, read_fields
from flax_attn.models.bert import Bert, BertMaskedLM
from flax_attn.models.deepseekv3 import DeepseekV3
from flax_attn.models.diffllama import DiffLlama
from flax_attn.models.dinov2 import DINOv2, DINOv2Classifier
from flax_attn.models.gemma import Gemma
from flax_attn.models.gemma2 import Gemma2
from flax_attn.models.gemma3 import Gemma3
from flax_attn.models.gpt2 import GPT2
from flax_attn.models.gptoss import GptOss
from flax_attn.models.hugging_face.options import LoadOptions, check_options
from flax_attn.models.llama import Llama
from flax_attn.models.mixtral import Mixtral
from flax_attn.models.modernbert import ModernBert, ModernBertMaskedLM
from flax_attn.models.olmo2 import Olmo2
from flax_attn.models.phi3 import Phi3
from flax_attn.models.pretrained import Pretrained
from flax_attn.models.qwen2 import Qwen2
from flax_attn.models.qwen3 import Qwen3
from flax_attn.models.qwen3moe import Qwen3Moe
from flax_attn.models.qwen3next import Qwen3Next
from flax_attn.models.smollm3 import SmolLM3
from flax_attn.models.t5 import T5
from flax_attn.models.vit import ViT, ViTClassifier
from flax_attn.models.whisper import Whisper

FAMILIES: tuple[type[Pretrained], ...] = (
    GPT2,
    Llama,
    Qwen2,
    Qwen3,
    Phi3,
    Gemma,
    Gemma2,
    Gemma3,
    Olmo2,
    SmolLM3,
    DiffLlama,
    Mixtral,
    Qwen3Moe,
    Qwen3Next,
    GptOss,
    DeepseekV3,
    Bert,
    BertMaskedLM,
    ViT,
    ViTClassifier,
    DINOv2,
    DINOv2Classifier,
    ModernBert,
    ModernBertMaskedLM,
    T5,
    Whisper,
)


def model_types() -> dict[str, type[Pretrained]]:
    """Return the first class of each `model_type` that `config.json` may name.

    Example:
        >>> model_types()["mistral"].__name__
        'Llama'
    """
    found: dict[str, type[Pretrained]] = {}
    for cls in FAMILIES:
        for name in cls.family.read if cls.family else ():
            found.setdefault(name, cls)
    return found


def model_class(path: str | PathLike[str]) -> type[Pretrained]:
    """Return the class of the model in a Hugging Face folder, by its `config.json`.

    Raises:
        FileNotFoundError: if there is no such folder or file.
        ValueError: if the file is not JSON or of a family that is not known, or names a class of
            transformers that none of ours computes; the message lists those that are known.
    """
    fields = read_fields(Path(path))
    first = fields.choose("model_type", model_types())
    # Several classes read one `model_type` where there are heads to choose from.
    if first.family and first.family.architecture:
        return _by_architecture(fields, first)
    return first


def _by_architecture(fields: Fields, first: type[Pretrained]) -> type[Pretrained]:
    """Return the class of a `model_type` that the file names; without a name, the first."""
    kind = fields.text("model_type")
    architectures = fields.optional_texts("architectures")
    known = {}
    for cls in FAMILIES:
        if cls.family and kind in cls.family.read:
            known[cls.family.architecture] = cls
    if not architectures:
        fields.check_spelling()
        return first
    named = architectures[0]
    if named not in known:
        names = ", ".join(map(repr, known))
        near = nearest(named, known)
        raise ValueError(
            f"{fields.where}: architectures must name one of {names}; got {architectures}{near}."
            f" For a head of your own begin with {first.__name__}.from_pretrained"
        )
    return known[named]


def from_pretrained(path: str | PathLike[str], **options: Unpack[LoadOptions]) -> Pretrained:
    """Return the model of a local Hugging Face folder, in eval mode.

    Its class is the one that `config.json` names.

    `Llama.from_pretrained(path)` is the same for a folder that is known to hold a `Llama`. A head
    that is tied is read once, whatever the file holds. The context is `max_position_embeddings`;
    with dynamic RoPE scaling it is `factor` times that. Weights of a safetensors file may stay
    mapped: it may be replaced while the model is used, and must not be written over.

    Args:
        path: the folder.
        dtype: dtype of the computation; None is that of the parameters.
        param_dtype: dtype of the parameters; None is that of each weight in the files.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: attention backend; `"auto"` or the name of one.
        remat: whether the backward pass recomputes each block instead of storing its activations.
        scan_layers: whether the parameters of the blocks are stacked, and the blocks run by one
            scan: compiled once.
        dropout: the probability of dropout in train mode; None is that of `config.json`.
        rngs: random streams from which dropout draws its keys; None is `nnx.Rngs(0)`.
        progress: whether to show a bar on stderr; None is where that is a terminal.
        mesh: mesh that the parameters are split over, as in `flax_attn.sharding.shardings`. A
            process reads only the parts of its devices, but all of a PyTorch checkpoint. None is
            the default device.
        weights: `"int8"` holds the matrices in 8 bits for generating, as `quantize` does;
            `"stored"` holds those that the folder stores in 8 or 4 bits as they are; None makes
            floats of all.

    Raises:
        TypeError: if an option has another name.
        FileNotFoundError: if there is no such folder, or `config.json`, the weights or a shard is
            missing.
        ValueError: if the family is not known, the config asks for what ours does not compute, a
            file is damaged, or weights are missing, unexpected, mis-shaped or of an unknown dtype:
            all are listed, and none is read. Also if the mesh has no axis of the table.

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
    # The class is read from a file.
    check_options(options)
    return model_class(path).from_pretrained(path, **options)


def save_pretrained(
    model: Pretrained, path: str | PathLike[str], *, max_shard_size: int = 4 * 10**9
) -> None:
    """Write a model as a Hugging Face folder that transformers loads, bit for bit.

    `model.save_pretrained(path)` is the same. A `Llama` with a window is stored as Mistral. Other
    files of the folder stay, such as those of a tokenizer. Of a model on a mesh the weights are
    gathered one by one. Of several processes each must call this: the first one writes.

    A folder that holds a model holds the old one or the new one at every moment, config and
    weights, also if the save is killed, interrupted or fails, on a full disk for example. Until a
    save has ended, files of it are named `.saving-*`, and for a moment `config.json` names them by
    `transformers_weights`, which this package reads, and transformers from version 4.52 on. What a
    killed save has left is removed by the next one. Processes that save into one folder wait for
    one another. This is so for killed processes; after a loss of power it depends on the file
    system. A model that is loaded while another is saved into its folder may have weights of both.

    Args:
        model: model of one of the families.
        path: the folder; made if there is none.
        max_shard_size: bytes of weights in one file; no more is in memory a second time.

    Raises:
        ValueError: if transformers has no model that computes the same, `max_shard_size` is not
            positive or the path is that of a file.

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
    check_type("model", model, Pretrained, "a model of flax_attn.models, such as a GPT2")
    model.save_pretrained(path, max_shard_size=max_shard_size)
