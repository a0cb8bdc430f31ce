"""Programs written by `jax.export`: loaded in another process, for other platforms.

The batch is symbolic.
"""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask, dot_product_attention, native
from flax_attn.backends.call import prepare
from flax_attn.backends.native import kernel
from flax_attn.backends.registry import BACKENDS, load
from flax_attn.modules.matrix_product import dot_general

built = pytest.mark.skipif(
    native.library() is None, reason="the library was not built: no C++ compiler"
)
OURS = re.compile(r"custom_call @(flax_attn[\w.]+)")
EVERYWHERE = [name for name in BACKENDS if load(name).platforms is None]


def step(x, matrix):
    """Return a loss that calls every function but the grouped product, and its gradients."""

    def loss(x, matrix):
        output = dot_product_attention(
            x, x, x, mask=Mask.causal(), sinks=jnp.arange(2.0), soft_cap=3.0
        )
        return jnp.square(dot_general(output[:, -1, 0], matrix, (((1,), (0,)), ((), ())))).sum()

    return jax.value_and_grad(loss, argnums=(0, 1))(x, matrix)


def arrays(b=3):
    random = np.random.default_rng(b)
    return tuple(
        jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((b, 80, 2, 16), (16, 5))
    )


def exported(function, *arguments, **options):
    return jax.export.export(jax.jit(function), disabled_checks=native.export_checks(), **options)(
        *arguments
    )


def calls(program):
    return set(OURS.findall(program.mlir_module()))


LOAD = """
import sys
import jax, numpy as np
from flax_attn.native import export_checks
export_checks()
folder = sys.argv[1]
program = jax.export.deserialize(open(f"{folder}/program", "rb").read())
given = np.load(f"{folder}/given.npz")
loss, gradients = program.call(given["x"], given["matrix"])
np.savez(f"{folder}/found.npz", loss=loss, x=gradients[0], matrix=gradients[1])
"""


@built
@pytest.mark.usefixtures("no_shape_checks")
def test_a_program_is_loaded_in_another_process(tmp_path, close):
    x, matrix = arrays()
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 80, 2, 16"), x.dtype)
    for given in (x, symbolic):
        program = exported(step, given, matrix)
        assert {"flax_attn.attention_forward.v1", "flax_attn.attention_backward.v1"} <= calls(
            program
        )
        (tmp_path / "program").write_bytes(program.serialize())
        np.savez(tmp_path / "given.npz", x=x, matrix=matrix)
        done = subprocess.run(
            [sys.executable, "-c", LOAD, tmp_path], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        with np.load(tmp_path / "found.npz") as file:
            found = dict(file)
        loss, (d_x, d_matrix) = jax.jit(step)(x, matrix)
        close(found, {"loss": loss, "x": d_x, "matrix": d_matrix})


@built
@pytest.mark.parametrize("platforms", [["tpu"], ["cuda"], ["tpu", "cuda"]], ids=str)
def test_a_program_for_another_platform_holds_no_call_of_the_library(platforms):
    assert calls(exported(step, *arrays(), platforms=platforms)) == set()


@built
def test_a_program_for_several_platforms_holds_calls_for_cpus(close):
    program = exported(step, *arrays(), platforms=["cpu", "tpu"])
    assert "flax_attn.attention_forward.v1" in calls(program)
    close(program.call(*arrays()), step(*arrays()))


@built
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("segments", [0, 1], ids=["no segments", "segments"])
@pytest.mark.parametrize("sinks", [0, 4], ids=["no sinks", "sinks"])
def test_what_other_platforms_compute_is_the_same(heads_first, segments, sinks, close):
    random, batch, t = np.random.default_rng(0), (2, 3), 23
    s = 40 if heads_first else t

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    def ids(*shape):
        return jnp.asarray(random.integers(0, 2, shape), jnp.int32)

    # Every row sees a key: of others the maximum is any number.
    mask = Mask.window(20, 9, jnp.asarray(s - t)) & Mask.lengths(key=jnp.array([30, s, 28]))
    if segments:
        mask = mask & Mask.segments(ids(3, t), ids(3, s))
    options = {"sinks": draw(4), "soft_cap": 8.0} if sinks else {}
    call = prepare(draw(3, t, 4, 8), draw(3, s, 2, 8), draw(3, s, 2, 5), mask=mask, **options)
    # As under `jax.vmap`: another axis before those of every array.
    call = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x)]), call)

    leaves, structure = jax.tree.flatten((call,))
    how = {"structure": structure, "differentiated": True}
    found = kernel._forward.bind(*leaves, **how)
    close(list(found), kernel._plain_forward(*leaves, **how))

    cotangent = draw(*batch, t, 4, 5)
    leaves, structure = jax.tree.flatten((call, kernel.Results(*found), cotangent))
    found = kernel._backward.bind(*leaves, structure=structure)
    close(list(found), list(kernel._plain_backward(*leaves, structure=structure)))


@pytest.mark.parametrize("backend", ["auto", "native", *EVERYWHERE])
@pytest.mark.usefixtures("no_shape_checks")
def test_a_batch_that_is_symbolic(backend, close):
    if backend == "native" and native.library() is None:
        pytest.skip("the library was not built: no C++ compiler")

    def attend(x):
        return dot_product_attention(x, x, x, mask=Mask.causal(), backend=backend)

    x = arrays()[0]
    program = exported(
        attend, jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 80, 2, 16"), x.dtype)
    )
    close(program.call(x), jax.jit(attend)(x))


@pytest.mark.parametrize("sizes", ["b, t, 2, 16", "b, 80, n, 16", "b, 80, 2, h"])
@pytest.mark.usefixtures("no_shape_checks")
def test_another_size_that_is_symbolic_is_refused(sizes):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(sizes), jnp.float32)
    rule = (
        r"the batch alone may be symbolic in jax\.export; got query, key and value \(b, .* Export"
        r" for each number of"
    )
    with pytest.raises(ValueError, match=rule):
        exported(lambda x: dot_product_attention(x, x, x), x)
