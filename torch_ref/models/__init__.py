"""Whole models, by family: their checkpoints, and text from them."""

from torch_ref.models.generate import generate
from torch_ref.models.gpt2 import GPT2, GPT2_CONFIGS, GPT2Config
from torch_ref.models.language_model import LanguageModel
from torch_ref.models.llama import Llama, LlamaConfig

__all__ = [
    "GPT2",
    "GPT2_CONFIGS",
    "GPT2Config",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "generate",
]
