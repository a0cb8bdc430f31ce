"""Whole models, by family: their checkpoints, and text from them."""

from flax_attn.models.generate import generate
from flax_attn.models.gpt2 import GPT2, GPT2_CONFIGS, GPT2Config
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.llama import Llama, LlamaConfig
from flax_attn.models.registry import from_pretrained, save_pretrained

__all__ = [
    "GPT2",
    "GPT2_CONFIGS",
    "GPT2Config",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "from_pretrained",
    "generate",
    "save_pretrained",
]
