from .checkpoints import Checkpoints
from .precision import Float32State, float32_state
from .step import train_step

__all__ = ["Checkpoints", "Float32State", "float32_state", "train_step"]
