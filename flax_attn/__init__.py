"""Attention for JAX, every variant proven equal to PyTorch."""

from flax_attn.attention import dot_product_attention, single_head_attention
from flax_attn.backends.call import Unsupported
from flax_attn.functional.cache import KVCache
from flax_attn.functional.causal_softmax import causal_softmax_masked, causal_softmax_renormalized
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.frequencies import DynamicNTKScaling, LinearScaling, Llama3Scaling, YaRNScaling
from flax_attn.functional.masks import Mask, create_causal_mask
from flax_attn.functional.positions import RoPE, sinusoidal
from flax_attn.functional.relative import alibi, alibi_slopes, t5_bias, t5_buckets
from flax_attn.functional.scores import Scores
from flax_attn.models.generate import generate
from flax_attn.models.gpt2 import GPT2, GPT2_CONFIGS, GPT2Config, create_gpt2_attention
from flax_attn.models.llama import Llama, LlamaConfig
from flax_attn.models.registry import from_pretrained, save_pretrained
from flax_attn.modules.backend import set_backend
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.causal import CausalAttention
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.feed_forward import FeedForward, GatedFeedForward
from flax_attn.modules.linear import Linear
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.multi_head_wrapper import MultiHeadAttentionWrapper
from flax_attn.modules.norm import LayerNorm, RMSNorm
from flax_attn.modules.self_attention import SelfAttention
from flax_attn.modules.simplified import SimplifiedSelfAttention
from flax_attn.sharding.explain import explain

__version__ = "0.1.0"

__all__ = [
    "GPT2",
    "GPT2_CONFIGS",
    "CausalAttention",
    "Dropout",
    "DynamicNTKScaling",
    "Embedding",
    "FeedForward",
    "GPT2Config",
    "GatedFeedForward",
    "KVCache",
    "KeyedDropout",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama",
    "Llama3Scaling",
    "LlamaConfig",
    "Mask",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "RMSNorm",
    "RoPE",
    "Scores",
    "SelfAttention",
    "SimplifiedSelfAttention",
    "TransformerBlock",
    "Unsupported",
    "YaRNScaling",
    "alibi",
    "alibi_slopes",
    "causal_softmax_masked",
    "causal_softmax_renormalized",
    "create_causal_mask",
    "create_gpt2_attention",
    "dot_product_attention",
    "explain",
    "from_pretrained",
    "generate",
    "save_pretrained",
    "set_backend",
    "single_head_attention",
    "sinusoidal",
    "t5_bias",
    "t5_buckets",
]
