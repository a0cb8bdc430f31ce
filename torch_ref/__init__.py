"""The attention variants of `flax_attn` in plain PyTorch: the readable reference.

Files, names, arguments and defaults are those of `flax_attn`. A docstring here has the formula, the
shapes and an example; what the twin of the same name says word for word, on arguments, errors and
references, is only there.
"""

from attn_spec.frequencies import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    YaRNScaling,
)
from attn_spec.longrope import LongRoPEScaling
from attn_spec.scores import Scores
from torch_ref import models
from torch_ref.attention import (
    attend,
    attend_one_head,
    dot_product_attention,
    single_head_attention,
)
from torch_ref.functional.cache import KVCache
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.causal_mask import create_causal_mask
from torch_ref.functional.causal_softmax import causal_softmax_masked, causal_softmax_renormalized
from torch_ref.functional.delta_cache import DeltaCache
from torch_ref.functional.delta_rule import gated_delta_rule
from torch_ref.functional.dropout import KeyedDropout
from torch_ref.functional.masks import Mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.positions import RoPE, sinusoidal
from torch_ref.functional.relative import alibi, alibi_slopes, t5_bias, t5_buckets
from torch_ref.functional.score_function import ScoreFunction
from torch_ref.models.generate import generate
from torch_ref.models.gpt2 import GPT2, GPT2_CONFIGS, GPT2Config, create_gpt2_attention
from torch_ref.models.llama import Llama, LlamaConfig
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.calls import Attention
from torch_ref.modules.causal import CausalAttention
from torch_ref.modules.convolution import Convolution
from torch_ref.modules.cross_attention import CrossAttention
from torch_ref.modules.cross_block import CrossBlock
from torch_ref.modules.decay import DecayRate
from torch_ref.modules.delta_attention import DeltaAttention
from torch_ref.modules.differential import DifferentialAttention
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.experts import ClampedSwiGLU, Experts
from torch_ref.modules.feed_forward import FeedForward, GatedFeedForward
from torch_ref.modules.gated_delta_net import GatedDeltaNet
from torch_ref.modules.head_attention import HeadAttention
from torch_ref.modules.kimi_delta_attention import KimiDeltaAttention
from torch_ref.modules.latent_attention import MultiHeadLatentAttention
from torch_ref.modules.layer_scale import LayerScale
from torch_ref.modules.linear import Linear
from torch_ref.modules.local import LocalAttention
from torch_ref.modules.mixture import MixtureOfExperts
from torch_ref.modules.multi_head import MultiHeadAttention
from torch_ref.modules.multi_head_wrapper import MultiHeadAttentionWrapper
from torch_ref.modules.norm import LayerNorm, RMSNorm
from torch_ref.modules.patches import Patches
from torch_ref.modules.quantized_linear import QuantizedLinear
from torch_ref.modules.router import Router, Routing, load_balancing_loss
from torch_ref.modules.self_attention import SelfAttention
from torch_ref.modules.short_convolution import ShortConvolution
from torch_ref.modules.simplified import SimplifiedSelfAttention

__all__ = [
    "GPT2",
    "GPT2_CONFIGS",
    "Attention",
    "Cache",
    "CausalAttention",
    "ClampedSwiGLU",
    "Convolution",
    "CrossAttention",
    "CrossBlock",
    "DecayRate",
    "DeltaAttention",
    "DeltaCache",
    "DifferentialAttention",
    "Dropout",
    "DynamicNTKScaling",
    "Embedding",
    "Experts",
    "FeedForward",
    "GPT2Config",
    "GatedDeltaNet",
    "GatedFeedForward",
    "HeadAttention",
    "KVCache",
    "KeyedDropout",
    "KimiDeltaAttention",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "LinearScaling",
    "Llama",
    "Llama3Scaling",
    "LlamaConfig",
    "LocalAttention",
    "LongRoPEScaling",
    "Mask",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "MultiHeadLatentAttention",
    "Outputs",
    "Patches",
    "QuantizedLinear",
    "RMSNorm",
    "RoPE",
    "Router",
    "Routing",
    "ScoreFunction",
    "Scores",
    "SelfAttention",
    "ShortConvolution",
    "SimplifiedSelfAttention",
    "TransformerBlock",
    "YaRNScaling",
    "alibi",
    "alibi_slopes",
    "attend",
    "attend_one_head",
    "causal_softmax_masked",
    "causal_softmax_renormalized",
    "create_causal_mask",
    "create_gpt2_attention",
    "dot_product_attention",
    "gated_delta_rule",
    "generate",
    "load_balancing_loss",
    "models",
    "single_head_attention",
    "sinusoidal",
    "t5_bias",
    "t5_buckets",
]
