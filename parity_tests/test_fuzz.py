"""Random calls in `torch_ref`, judged by the formula in NumPy as those of `flax_attn` are."""

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import torch_ref

ROOT = Path(__file__).parents[1]
# Tests are not installed.
sys.path.append(str(ROOT))

from tests.fuzz import calls  # noqa: E402, found there
from tests.fuzz.attention import KEY, NAMES, Attention, cast  # noqa: E402
from tests.fuzz.integers import Integers  # noqa: E402
from tests.fuzz.judge import Judged, Wrong  # noqa: E402

SHARE = range(300)
# Calls of a test.
TOGETHER = 50


def as_tensor(x: np.ndarray) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.tensor(x.astype(np.float32)).bfloat16()
    return torch.tensor(x)


def as_array(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.detach().float().numpy().astype(ml_dtypes.bfloat16)
    return x.detach().numpy()


def given(integers: Integers) -> Any:
    array = integers.array()
    return torch.as_tensor(array) if integers.form == "jax" else array


def mask_of(case: Attention) -> Any:
    mask = torch_ref.Mask()
    for part in case.parts:
        mask = mask & part.build(torch_ref.Mask, given)
    return mask


def results(case: Attention) -> dict[str, np.ndarray]:
    """Return what `torch_ref` computes: output, weights and gradients."""
    arrays = {name: as_tensor(x).requires_grad_() for name, x in case.rounded().items()}
    output, weights = attend(case, arrays)
    output.backward(as_tensor(cast(case.cotangent, case.dtype)))
    gradients = {name: as_array(x.grad) for name, x in arrays.items()}
    return {"output": as_array(output), "weights": as_array(weights), **gradients}


def attend(case: Attention, arrays: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and weights, with an axis of rows also where the call has none."""
    options = options_of(case)
    if not case.unbatched:
        found = torch_ref.attend(**arrays, **options)
        return found.output, found.weights
    found = torch_ref.attend(**arrays | {name: arrays[name][0] for name in NAMES[:3]}, **options)
    return found.output[None], found.weights[None]


def options_of(case: Attention) -> dict[str, Any]:
    dropout = torch_ref.KeyedDropout(case.rate, torch.tensor(KEY.astype(np.int64)))
    return {
        "mask": mask_of(case),
        "scale": case.scale,
        "soft_cap": case.soft_cap,
        "dropout": dropout if case.rate else None,
        "return_weights": True,
    }


def check(case: Attention) -> None:
    """Raise unless a call is as it has to be."""
    try:
        found = results(case)
    except ValueError as error:
        if not (case.wrong or case.refusable) or "got" not in str(error):
            raise
        return
    if case.wrong:
        raise Wrong("taken, although the contract refuses it")
    cotangent = cast(case.cotangent, case.dtype)
    Judged(case.dtype, found, case.rounded(), cotangent, case.options, case.chooses).check()


# NumPy's integers are no int of the annotations.
@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("first", SHARE[::TOGETHER])
def test_random_calls_equal_the_formula(first):
    drawn = (calls.draw(np.random.default_rng(i)) for i in range(first, first + TOGETHER))
    for case in drawn:
        # Functions of scores are written for JAX.
        if case.score is not None:
            continue
        try:
            check(case)
        except Exception as error:
            error.add_note(str(case))
            raise
