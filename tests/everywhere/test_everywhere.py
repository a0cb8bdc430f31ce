"""`everywhere` itself: what decides, what is restored, what is counted, and what it refuses."""

import importlib
import inspect
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.nn import dot_product_attention  # by name, before any block

from flax_attn import everywhere
from flax_attn.backends.registry import BACKENDS
from flax_attn.everywhere import switch
from flax_attn.everywhere.context import CONTEXT, OFF, Settings, in_use
from flax_attn.everywhere.install import Installation
from flax_attn.everywhere.redirect import plain_function, redirect
from flax_attn.everywhere.target import Place, Target
from flax_attn.everywhere.targets import NAMES, load

X = jnp.ones((2, 64, 4, 8))


def attend(x=X):
    return dot_product_attention(x, x, x, is_causal=True)


def computed(report):
    return sum(report.taken.values())


def test_a_block_takes_calls_by_every_name_and_nothing_after_it():
    code = dot_product_attention.__code__
    signature = inspect.signature(dot_product_attention)
    with everywhere() as report:
        assert dot_product_attention.__code__ is not code
        assert inspect.signature(dot_product_attention) == signature
        attend()
        jax.nn.dot_product_attention(X, X, X)
    attend()
    assert computed(report) == 2
    assert dot_product_attention.__code__ is code
    assert "__signature__" not in vars(dot_product_attention)


def test_an_exception_restores_everything():
    code = dot_product_attention.__code__
    with pytest.raises(RuntimeError, match="of the user"), everywhere():
        raise RuntimeError("of the user")
    assert dot_product_attention.__code__ is code
    assert in_use() == OFF
    with everywhere() as report:
        attend()
    assert computed(report) == 1


def test_what_is_compiled_inside_is_not_found_outside():
    text = jax.jit(attend)
    outside = text.lower(X).as_text()
    text(X)
    with everywhere() as report:
        inside = text.lower(X).as_text()
        text(X)
    assert computed(report) == 1
    assert inside != outside
    assert text.lower(X).as_text() == outside
    with everywhere() as again:
        assert text.lower(X).as_text() == inside
    assert computed(again) == 0  # nothing is traced once more
    assert "compiled in an earlier block is not counted" in str(again)


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.jit])
def test_parts_that_jax_keeps_are_not_shared_with_a_block(transform):
    part = transform(attend)
    programs = []
    for _ in range(2):
        programs.append(str(jax.make_jaxpr(part)(X)))
        with everywhere():
            programs.append(str(jax.make_jaxpr(part)(X)))
    outside, inside, outside_again, inside_again = programs
    assert outside == outside_again
    assert inside == inside_again
    assert outside != inside


def test_blocks_nest():
    with everywhere() as outer:
        attend()
        with everywhere(False) as off:
            attend()
        with everywhere() as inner:
            attend()
        attend()
    assert [computed(report) for report in (outer, off, inner)] == [3, 0, 1]


def test_the_same_block_serves_twice():
    block = everywhere()
    for _ in range(2):
        with block as report:
            attend()
        assert computed(report) == 1


def test_a_block_is_for_its_thread():
    entered, done = threading.Event(), threading.Event()
    found = []

    def other():
        with everywhere() as report:
            entered.set()
            done.wait(30)
            attend()
        found.append(computed(report))

    before = computed(everywhere.report())
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30)
    attend()
    assert computed(everywhere.report()) == before
    done.set()
    thread.join()
    assert found == [1]
    assert computed(everywhere.report()) == before + 1


def test_threads_enter_and_leave_at_once():
    code = dot_product_attention.__code__
    found = []

    def work():
        for _ in range(20):
            with everywhere() as report:
                attend()
            found.append(computed(report))
            attend()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 80
    assert dot_product_attention.__code__ is code


def test_a_program_is_on_in_all_threads_until_it_is_off():
    code = dot_product_attention.__code__
    before = computed(everywhere.report())
    everywhere(True)
    try:
        everywhere(True)  # once more changes nothing
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
        with everywhere(False):
            attend()
    finally:
        everywhere(False)
    attend()
    assert computed(everywhere.report()) == before + 1
    assert dot_product_attention.__code__ is code


def test_a_block_with_an_argument_is_for_its_thread():
    with everywhere(True) as report:
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
        attend()
    assert computed(report) == 1
    assert in_use() == OFF


def test_targets_that_are_left_out_are_left_alone():
    layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    with everywhere(targets=["nnx"]) as report:
        attend()
        layer(jnp.ones((2, 64, 8)))
    assert [entry.place for entry in report.taken] == ["flax.nnx.dot_product_attention"]


def test_the_report_names_place_backend_and_memory():
    with everywhere() as report:
        attend()
        dot_product_attention(X, X, X, return_residual=True)
    line = inspect.getsourcelines(attend)[1] + 1
    (entry,) = report.taken
    assert entry.line == f"{__file__}:{line}"
    assert entry.asked == "q[2, 64, 4, 8] k[2, 64, 4, 8] float32, causal"
    assert entry.backend in BACKENDS
    assert entry.before == 2 * 4 * 64 * 64 * 9
    assert 0 < entry.after < entry.before
    text = str(report)
    assert text.startswith("1 calls computed by flax_attn, 1 left alone (counted as traced)")
    assert f"{entry.line}\n    1 x jax.nn.dot_product_attention: q[2, 64, 4, 8]" in text
    assert "    1 x jax.nn.dot_product_attention: left alone: return_residual=True" in text


def test_strict_makes_what_is_left_alone_an_error():
    message = r"jax.nn.dot_product_attention is left alone: return_residual=True .* strict=False"
    with everywhere(strict=True), pytest.raises(ValueError, match=message):
        dot_product_attention(X, X, X, return_residual=True)


def test_a_block_says_whether_it_is_on():
    block = everywhere(targets=["jax.nn"])
    settings = "everywhere, a block with targets=['jax.nn'], strict=False"
    assert repr(block) == f"{settings}, not entered: use it with `with`"
    with block:
        assert repr(block) == f"{settings}, entered"
    on = everywhere(True, targets=["jax.nn"])
    everywhere(False)
    assert repr(on) == "everywhere, on for the program with targets=['jax.nn'], strict=False"


@pytest.mark.parametrize("shape", [(64,), (4, 8), (2, 3, 16, 4, 8)])
def test_a_query_of_another_rank_is_left_to_the_original(shape):
    x = jnp.ones(shape)
    try:
        expected = dot_product_attention(x, x, x)
    except Exception as refused:
        with everywhere() as report, pytest.raises(type(refused)):
            dot_product_attention(x, x, x)
    else:
        with everywhere() as report:
            found = dot_product_attention(x, x, x)
        assert jnp.array_equal(found, expected)
    (entry,) = report.left_alone
    assert entry.reason == f"a query of rank {len(shape)}"


def test_a_mask_that_is_a_constant_is_not_computed_with_by_the_compiler():
    shown = np.random.default_rng(0).random((2, 1, 64, 64)) < 0.7
    masked = jax.jit(lambda x: dot_product_attention(x, x, x, mask=jnp.asarray(shown)))
    with everywhere():
        program = masked.lower(jnp.ones((2, 64, 4, 8))).compile().as_text()
    # Which rows see no key: XLA takes seconds for as many tokens as models have.
    assert "reduce" in program


def test_complex_numbers_are_left_alone():
    x = X.astype(jnp.complex64)
    with everywhere() as report, pytest.raises(Exception, match="complex"):
        dot_product_attention(x, x, x)
    (entry,) = report.left_alone
    assert "complex64" in entry.reason


def test_the_original_of_a_call_that_is_left_alone_is_counted_once():
    query = jnp.ones((2, 64, 4, 8))
    with everywhere() as report:
        linen.dot_product_attention(
            query,
            query,
            query,
            qk_attn_weights_einsum=jnp.einsum,
            attn_weights_value_einsum=jnp.einsum,
        )
    (entry,) = report.left_alone
    assert entry.place == "flax.linen.dot_product_attention"


def test_a_backend_that_calls_a_target_has_the_original():
    names = {"__name__": "flax_attn.backends.cudnn", "attend": dot_product_attention, "x": X}
    with everywhere(strict=True) as report:
        eval("attend(x, x, x, return_residual=True)", names)
        eval("attend(x, x, x)", names | {"__name__": "a_model"})
    assert computed(report) == 1
    assert not report.left_alone


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match=r"a target must be one of 'jax.nn', .* got 'torch'"):
        everywhere(targets=["nnx", "torch"])


def test_a_target_that_is_not_installed_is_refused(monkeypatch):
    absent = Target("nnx", "no_such_package", ">=1", ())
    monkeypatch.setattr(switch, "load", lambda name: absent)
    with pytest.raises(ValueError, match="'nnx' is not installed: there is no package 'no_such"):
        everywhere(targets=["nnx"])


@pytest.mark.parametrize(
    ("on", "targets", "strict", "message"),
    [
        (None, "nnx", False, r"targets must be list or tuple; got str.*a list of names"),
        (None, [], False, "targets must name at least one of"),
        ("nnx", None, False, "on must be bool or None; got str"),
        (None, None, None, "strict must be bool; got NoneType"),
    ],
)
def test_arguments_of_other_types_are_refused(on, targets, strict, message):
    with pytest.raises(ValueError, match=message):
        switch.settings_of(on, targets, strict)


def test_other_options_inside_a_block_are_refused():
    message = r"on with targets=\['nnx'\], strict=False; got targets=\['nnx'\], strict=True"
    with (
        everywhere(targets=["nnx"]),
        pytest.raises(ValueError, match=message),
        everywhere(targets=["nnx"], strict=True),
    ):
        pass
    assert in_use() == OFF


def test_other_options_of_a_program_are_refused():
    everywhere(True, targets=["nnx"])
    try:
        with pytest.raises(ValueError, match="everywhere is on with"):
            everywhere(True)
    finally:
        everywhere(False)


@pytest.mark.parametrize("on", [None, True, False])
def test_inside_a_trace_it_is_refused(on):
    @jax.jit
    def step(x):
        with everywhere(on):
            return attend(x)

    with pytest.raises(ValueError, match="it was called inside a trace"):
        step(X)
    assert in_use() == OFF


def test_a_version_that_is_not_known_is_left_alone_with_one_warning(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "99.0")
    code = dot_product_attention.__code__
    monkeypatch.setattr(switch.INSTALLATION, "_warned", set())
    message = r"leaves jax.nn of jax 99.0 alone"
    with pytest.warns(UserWarning, match=message) as found, everywhere() as report:
        attend()
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with everywhere():
            attend()
    assert computed(report) == 0
    assert dot_product_attention.__code__ is code


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that is not imported yet, and an installation that knows it."""
    (tmp_path / "attending.py").write_text(
        "__version__ = '1.0'\ndef attend(x, factor=2):\n    return factor * x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield Target("attending", "attending", ">=1,<2", (Place("attending", "attend", doubled),))
    sys.modules.pop("attending", None)


def doubled(original, x, factor=2):
    return [original(x, factor)]


def test_a_target_that_is_imported_inside_is_taken(library):
    installation = Installation([library])
    finders = list(sys.meta_path)
    assert library.installed
    installation.enter()
    assert "attending" not in sys.modules
    attending = importlib.import_module("attending")
    assert "_Then" not in repr(attending.__spec__.loader)
    with CONTEXT(Settings(("attending",))):
        assert attending.attend(3) == [6]
    assert attending.attend(3) == 6
    installation.leave()
    with CONTEXT(Settings(("attending",))):
        assert attending.attend(3) == 6
    assert sys.meta_path == finders


def test_a_place_that_is_missing_leaves_nothing_changed(library):
    importlib.import_module("attending")
    missing = Place("attending", "gone", doubled)
    installation = Installation([replace(library, places=(*library.places, missing))])
    finders = list(sys.meta_path)
    with pytest.raises(KeyError, match="gone"):
        installation.enter()
    with CONTEXT(Settings(("attending",))):
        assert sys.modules["attending"].attend(3) == 6
    assert sys.meta_path == finders


def test_importing_it_imports_and_changes_no_target():
    script = "import flax_attn, sys; flax_attn.everywhere(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not {"keras", "equinox", "haiku"} & set(run.stdout.split())


@pytest.mark.parametrize("name", NAMES)
def test_places_exist_in_what_is_installed(name):
    target = load(name)
    assert target.name == name
    if not target.installed:
        pytest.skip(f"{target.package} is not installed")
    assert target.places


def test_a_method_is_redirected_with_its_class():
    class Base:
        def name(self, mark="!"):
            return f"base{mark}"

    class Derived(Base):
        def name(self, mark="!"):
            return f"derived of {super().name(mark)}"

    found = redirect(Derived.name, lambda original, *args, **kwargs: [original(*args, **kwargs)])
    assert Derived().name() == ["derived of base!"]
    assert Derived().name(mark="?") == ["derived of base?"]
    found.undo()
    assert Derived().name() == "derived of base!"


def test_what_has_no_code_cannot_be_redirected():
    with pytest.raises(TypeError, match="no function of Python, whose code can be changed"):
        plain_function(len)
