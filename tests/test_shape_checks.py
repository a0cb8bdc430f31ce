"""The tests check the shapes in annotations, of arguments together and of results."""

import jax.numpy as jnp
import jaxtyping
import pytest

from flax_attn import dot_product_attention


def test_an_axis_has_one_size_in_a_call():
    query, key = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 4, 6))
    with pytest.raises(jaxtyping.TypeCheckError, match=r"dot_product_attention\(\) parameter key"):
        dot_product_attention(query, key, query)


@pytest.mark.usefixtures("no_shape_checks")
def test_without_the_check_the_library_says_it_itself():
    query, key = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 4, 6))
    with pytest.raises(ValueError, match="8"):
        dot_product_attention(query, key, query)
