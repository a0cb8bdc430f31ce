"""Models on several devices: the names of axes, the mesh axes they are split over, and attention in parts."""

from flax_attn.sharding.axes import RULES, constrain, rules, spec

__all__ = ["RULES", "constrain", "rules", "spec"]
