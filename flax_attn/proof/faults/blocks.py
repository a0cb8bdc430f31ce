"""Faults of the transformer block: the order of its parts, and the way around them."""

from __future__ import annotations

from collections.abc import Callable

import torch_ref
from flax_attn.proof.faults.fault import Plant, fault
from torch_ref.functional.dropout import fold_in
from torch_ref.modules import block


class Block(torch_ref.TransformerBlock):
    """The pre-norm block, with the way around a sublayer as a method, for faults to replace."""

    def around(self, x, norm, sublayer, key):
        """Return `x + drop(sublayer(norm(x)))`."""
        return x + self.drop_shortcut(sublayer(norm(x)), dropout_key=key)

    def forward(self, x, *, mask=None, return_weights=False, dropout_key=None):
        """Return the tokens and the weights."""
        keys, weights = [fold_in(dropout_key, i) for i in range(3)], []

        def attend(x):
            attended, *rest = self.att(x, mask=mask, return_weights=True, dropout_key=keys[0])
            weights.extend(rest)
            return attended

        x = self.around(x, self.norm1, attend, keys[1])
        x = self.around(x, self.norm2, self.ff, keys[2])
        return x, weights[0]


@fault("block_gpt2")
def norm_after_for_norm_before(plant: Plant) -> None:
    """The norm comes after the sum, not first."""
    plant.module.norm_first = False


@fault("block_gpt2")
def no_residual(plant: Plant) -> None:
    """There is no way around the sublayers."""
    _around(plant, lambda self, x, norm, sublayer, key: self.drop_shortcut(sublayer(norm(x)), dropout_key=key))


@fault("block_gpt2")
def residual_of_the_normed(plant: Plant) -> None:
    """What goes around a sublayer is its normed input."""

    def around(self, x, norm, sublayer, key):
        return norm(x) + self.drop_shortcut(sublayer(norm(x)), dropout_key=key)

    _around(plant, around)


@fault("block_gpt2", check="dropout")
def dropout_of_the_sum(plant: Plant) -> None:
    """Dropout comes after the sum."""
    _around(plant, lambda self, x, norm, sublayer, key: self.drop_shortcut(x + sublayer(norm(x)), dropout_key=key))


@fault("block_gpt2", check="dropout")
def no_dropout_of_sublayers(plant: Plant) -> None:
    """The output of the sublayers is not dropped."""
    _around(plant, lambda self, x, norm, sublayer, key: x + sublayer(norm(x)))


@fault("block_gpt2", check="dropout")
def one_key_for_all_dropout(plant: Plant) -> None:
    """One dropout key serves every site."""
    plant.replace(block, "fold_in", lambda key, index: key)


def _around(plant: Plant, around: Callable) -> None:
    plant.module.__class__ = Block
    plant.replace(Block, "around", around)
