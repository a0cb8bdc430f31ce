from . import adapters, convert, models, parity, sharding, training
from .attention import attend, attend_one_head, dot_product_attention, single_head_attention
from .backends.call import Unsupported
from .everywhere import everywhere
from .functional.cache import KVCache
from .functional.cache_base import Cache
from .functional.causal_mask import create_causal_mask
from .functional.causal_softmax import causal_softmax_masked, causal_softmax_renormalized
from .functional.delta_cache import DeltaCache
from .functional.delta_rule import gated_delta_rule
from .functional.dropout import KeyedDropout
from .functional.masks import Mask
from .functional.outputs import Outputs
from .functional.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    RoPE,
    YaRNScaling,
    sinusoidal,
)
from .functional.relative import alibi, alibi_slopes, t5_bias, t5_buckets
from .functional.score_function import ScoreFunction
from .models.generate import generate
from .models.gpt2 import GPT2, GPT2_CONFIGS, GPT2Config, create_gpt2_attention
from .models.llama import Llama, LlamaConfig
from .models.registry import from_pretrained, save_pretrained
from .modules.backend import set_backend
from .modules.block import TransformerBlock
from .modules.calls import Attention
from .modules.causal import CausalAttention
from .modules.convolution import Convolution
from .modules.cross_attention import CrossAttention
from .modules.cross_block import CrossBlock
from .modules.decay import DecayRate
from .modules.delta_attention import DeltaAttention
from .modules.differential import DifferentialAttention
from .modules.dropout import Dropout
from .modules.embedding import Embedding
from .modules.experts import ClampedSwiGLU, Experts
from .modules.feed_forward import FeedForward, GatedFeedForward
from .modules.gated_delta_net import GatedDeltaNet
from .modules.head_attention import HeadAttention, Scores
from .modules.kimi_delta_attention import KimiDeltaAttention
from .modules.latent_attention import MultiHeadLatentAttention
from .modules.layer_scale import LayerScale
from .modules.linear import Linear
from .modules.local import LocalAttention
from .modules.mixture import MixtureOfExperts
from .modules.multi_head import MultiHeadAttention
from .modules.multi_head_wrapper import MultiHeadAttentionWrapper
from .modules.norm import LayerNorm, RMSNorm
from .modules.patches import Patches
from .modules.quantized_linear import QuantizedLinear
from .modules.router import Router, Routing, load_balancing_loss
from .modules.self_attention import SelfAttention
from .modules.short_convolution import ShortConvolution
from .modules.simplified import SimplifiedSelfAttention
from .modules.work import Work
from .sharding.explain import explain
from .sharding.explain_calls import explain_calls

__version__: str

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
    "Unsupported",
    "Work",
    "YaRNScaling",
    "adapters",
    "alibi",
    "alibi_slopes",
    "attend",
    "attend_one_head",
    "causal_softmax_masked",
    "causal_softmax_renormalized",
    "convert",
    "create_causal_mask",
    "create_gpt2_attention",
    "dot_product_attention",
    "everywhere",
    "explain",
    "explain_calls",
    "from_pretrained",
    "gated_delta_rule",
    "generate",
    "load_balancing_loss",
    "models",
    "parity",
    "save_pretrained",
    "set_backend",
    "sharding",
    "single_head_attention",
    "sinusoidal",
    "t5_bias",
    "t5_buckets",
    "training",
]
