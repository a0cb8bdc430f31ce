"""Training of language models: a step, parameters of low precision, and checkpoints that resume to the bit."""

from flax_attn.training.checkpoints import Checkpoints
from flax_attn.training.precision import Float32State, float32_state
from flax_attn.training.step import train_step

__all__ = ["Checkpoints", "Float32State", "float32_state", "train_step"]
