"""Compare the pairs in the migration guide: outputs and gradients, by flax_attn.parity's rules."""

import numpy as np
from flax import nnx

from flax_attn import convert
from flax_attn.parity import tolerance


def same(ours, theirs, rule=tolerance.FORWARD):
    """Assert that an array and a tensor are equal within a rule, relative to the largest value."""
    _check("equal", {"": np.asarray(ours)}, {"": theirs.detach().numpy()}, rule)


def same_gradients(grads, theirs, layout):
    """Assert that a Flax module and a PyTorch module have equal gradients after `backward`."""
    ours = {}
    for path, gradient in nnx.to_flat_state(grads):
        ours[".".join(map(str, path))] = np.asarray(gradient[...])
    ours = convert.to_layout(ours, layout)
    reference = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    # Softmax ignores the bias of the keys: its gradient is rounding, which is measured by the
    # largest of all.
    largest = max(abs(gradient).max() for gradient in reference.values())
    for name in tolerance.null_directions(reference):
        assert abs(ours[name]).max() <= tolerance.NULL * largest, name
    _check(f"{len(reference)} gradients equal", ours, reference, tolerance.GRADIENT)


def _check(what, ours, reference, rule):
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    error = max(tolerance.relative(ours, reference).values())
    assert error <= rule, f"not {what}: error {error:.1e}, rule {rule:.0e}"
    print(f"{what}: error {error:.0e}, rule {rule:.0e}")
