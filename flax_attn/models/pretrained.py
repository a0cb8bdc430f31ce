"""The base of models that Hugging Face folders store.

Only in flax_attn: PyTorch has transformers.
"""

from os import PathLike
from typing import Any, ClassVar, TypeVar, Unpack

from flax import nnx

from flax_attn.models.hugging_face.family import Family
from flax_attn.models.hugging_face.folder import load, save
from flax_attn.models.hugging_face.options import LoadOptions

M = TypeVar("M", bound="Pretrained")


class Pretrained(nnx.Module):
    """A model with a config, loaded from and saved to folders; a base class, see `LanguageModel`.

    A family sets `family`, and is built by `cls(config, backend=..., remat=..., scan_layers=...,
    dtype=..., param_dtype=..., precision=..., rngs=...)`.

    Attributes:
        family: how Hugging Face stores these models; None where it has none.
        config: the sizes.
    """

    family: ClassVar[Family | None] = None
    config: Any

    @classmethod
    def from_pretrained(
        cls: type[M], path: str | PathLike[str], **options: Unpack[LoadOptions]
    ) -> M:
        """Return the model of a local Hugging Face folder, in eval mode.

        See `flax_attn.models.from_pretrained`.

        Raises:
            ValueError: if the folder holds a model of another family.
        """
        return load(cls, cls.family, path, **options)

    def save_pretrained(
        self, path: str | PathLike[str], *, max_shard_size: int = 4 * 10**9
    ) -> None:
        """Write a folder that transformers loads; see `flax_attn.models.save_pretrained`."""
        save(self, self.config, self.family, path, max_shard_size)
