"""The attention variants of `flax_attn` in plain PyTorch: the readable reference."""

from torch_ref.attention import dot_product_attention, single_head_attention
from torch_ref.functional.cache import KVCache
from torch_ref.functional.causal_softmax import causal_softmax_masked, causal_softmax_renormalized
from torch_ref.functional.dropout import KeyedDropout
from torch_ref.functional.frequencies import DynamicNTKScaling, LinearScaling, Llama3Scaling, YaRNScaling
from torch_ref.functional.masks import Mask, create_causal_mask
from torch_ref.functional.positions import RoPE, sinusoidal
from torch_ref.functional.relative import alibi, alibi_slopes, t5_bias, t5_buckets
from torch_ref.functional.scores import Scores
from torch_ref.models.generate import generate
from torch_ref.models.gpt2 import GPT2, GPT2_CONFIGS, GPT2Config, create_gpt2_attention
from torch_ref.models.llama import Llama, LlamaConfig
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.causal import CausalAttention
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.feed_forward import FeedForward, GatedFeedForward
from torch_ref.modules.linear import Linear
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.multi_head_wrapper import MultiHeadAttentionWrapper
from torch_ref.modules.norm import LayerNorm, RMSNorm
from torch_ref.modules.self_attention import SelfAttention
from torch_ref.modules.simplified import SimplifiedSelfAttention

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
    "YaRNScaling",
    "alibi",
    "alibi_slopes",
    "causal_softmax_masked",
    "causal_softmax_renormalized",
    "create_causal_mask",
    "create_gpt2_attention",
    "dot_product_attention",
    "generate",
    "single_head_attention",
    "sinusoidal",
    "t5_bias",
    "t5_buckets",
]
