"""The proof that two modules are the same function: any JAX module against any PyTorch module.

from flax_attn.parity import compare, assert_parity

report = compare(flax_module, torch_module, [x])     # a report, check by check
assert_parity(flax_module, torch_module, [x])        # an error that says where they differ
"""

from flax_attn.parity.adapters.adapter import PairingError
from flax_attn.parity.check import Check
from flax_attn.parity.checks import CHECKS
from flax_attn.parity.compare import ParityError, assert_parity, compare
from flax_attn.parity.coverage import Coverage
from flax_attn.parity.report.report import Report
from flax_attn.parity.training import Recipe

__all__ = [
    "CHECKS",
    "Check",
    "Coverage",
    "PairingError",
    "ParityError",
    "Recipe",
    "Report",
    "assert_parity",
    "compare",
]
