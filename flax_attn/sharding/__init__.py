"""Models on several devices: names of axes, the mesh axes they are split over, split attention."""

from flax_attn.sharding.axes import RULES, constrain, rules, spec
from flax_attn.sharding.options import context_parallel
from flax_attn.sharding.parameters import shard, shardings
from flax_attn.sharding.sharding_table import ShardingTable, sharding_table
from flax_attn.sharding.zigzag_order import unzigzag, zigzag

__all__ = [
    "RULES",
    "ShardingTable",
    "constrain",
    "context_parallel",
    "rules",
    "shard",
    "sharding_table",
    "shardings",
    "spec",
    "unzigzag",
    "zigzag",
]
