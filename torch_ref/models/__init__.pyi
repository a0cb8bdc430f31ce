from .bert import Bert, BertConfig, BertMaskedLM
from .deepseekv3 import DeepseekV3, DeepseekV3Config
from .diffllama import DiffLlama, DiffLlamaConfig
from .dinov2 import DINOv2, DINOv2Classifier, DINOv2Config
from .gemma import Gemma, GemmaConfig
from .gemma2 import Gemma2, Gemma2Config
from .gemma3 import Gemma3, Gemma3Config
from .generate import generate
from .gpt2 import GPT2, GPT2_CONFIGS, GPT2Config
from .gptoss import GptOss, GptOssConfig
from .language_model import LanguageModel
from .llama import Llama, LlamaConfig
from .mixtral import Mixtral, MixtralConfig
from .modernbert import ModernBert, ModernBertConfig, ModernBertMaskedLM
from .olmo2 import Olmo2, Olmo2Config
from .phi3 import Phi3, Phi3Config
from .quantize import quantize
from .qwen2 import Qwen2, Qwen2Config
from .qwen3 import Qwen3, Qwen3Config
from .qwen3moe import Qwen3Moe, Qwen3MoeConfig
from .qwen3next import Qwen3Next, Qwen3NextConfig
from .smollm3 import SmolLM3, SmolLM3Config
from .t5 import T5, T5Config
from .vit import ViT, ViTClassifier, ViTConfig
from .whisper import Whisper, WhisperConfig

__all__ = [
    "GPT2",
    "GPT2_CONFIGS",
    "T5",
    "Bert",
    "BertConfig",
    "BertMaskedLM",
    "DINOv2",
    "DINOv2Classifier",
    "DINOv2Config",
    "DeepseekV3",
    "DeepseekV3Config",
    "DiffLlama",
    "DiffLlamaConfig",
    "GPT2Config",
    "Gemma",
    "Gemma2",
    "Gemma2Config",
    "Gemma3",
    "Gemma3Config",
    "GemmaConfig",
    "GptOss",
    "GptOssConfig",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "Mixtral",
    "MixtralConfig",
    "ModernBert",
    "ModernBertConfig",
    "ModernBertMaskedLM",
    "Olmo2",
    "Olmo2Config",
    "Phi3",
    "Phi3Config",
    "Qwen2",
    "Qwen2Config",
    "Qwen3",
    "Qwen3Config",
    "Qwen3Moe",
    "Qwen3MoeConfig",
    "Qwen3Next",
    "Qwen3NextConfig",
    "SmolLM3",
    "SmolLM3Config",
    "T5Config",
    "ViT",
    "ViTClassifier",
    "ViTConfig",
    "Whisper",
    "WhisperConfig",
    "generate",
    "quantize",
]
