"""What all tests share: the strictest JAX, and ways around it."""

import functools
import gc
import inspect
import os
import signal
import sys
import threading
import zlib
from collections import defaultdict
from pathlib import Path
from types import FunctionType

import jax
import jaxtyping
import pytest
from beartype import BeartypeConf, beartype
from jax._src.interpreters import mlir, partial_eval
from jaxtyping._decorator import _destring_annotation
from jaxtyping._storage import pop_shape_memo, push_shape_memo

PROGRAMS = 100  # that share a context, which keeps their names and constants

# Of the tests that take longest one case in so many runs, where no file is named or with `--share`.
# Of those with 0 none runs. `--whole` runs all.
SHARES = {
    "tests/native/test_sanitizers.py": 0,
    "tests/sharding/test_train_multihost.py::test_killed_processes": 0,
    "tests/backends/test_conformance.py": 6,
    "tests/backends/": 4,
    "tests/everywhere/": 4,
    "tests/functional/": 3,
    "tests/models/test_edited_configs.py": 8,
    "tests/models/": 4,
    "tests/modules/": 3,
    "tests/sharding/": 6,
    "parity_tests/functional/": 3,
    "parity_tests/models/": 4,
    "parity_tests/modules/": 3,
    "parity_tests/proof/test_faults.py": 3,
    "parity_tests/test_cli.py::test_rows_on_a_mesh": 5,
}


def _reused(make):
    """Return a function that calls `make` once for some calls of each thread."""
    thread = threading.local()

    def reuse():
        left = getattr(thread, "left", 0)
        if not left:
            thread.made = make()
        thread.left = (left or PROGRAMS) - 1
        return thread.made

    return reuse


# As jaxtyping raises it: a TypeError.
_check_types = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
# Globals of the wrapper of each function.
_OF_JAXTYPING = {
    "__name__": "jaxtyping",
    "jaxtyping": jaxtyping,
    "push_shape_memo": push_shape_memo,
    "pop_shape_memo": pop_shape_memo,
}


def _checked(function):
    """Check shapes and types of a call: each axis has one size in it.

    It is what `jaxtyping.jaxtyped` does, which binds the arguments of each call to names for its
    messages, and checks them once more with the result: an eighth of the time.
    """
    if not function.__annotations__:
        return function
    typed = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, function.__closure__
    )
    functools.update_wrapper(typed, function)
    del typed.__wrapped__  # of which beartype would read the annotations
    typed.__defaults__, typed.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    typed.__annotations__ = {
        name: _destring_annotation(annotation, function.__globals__)
        for name, annotation in function.__annotations__.items()
    }
    checked = _check_types(typed)

    def call(*args, **kwargs):
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        push_shape_memo({})
        try:
            return checked(*args, **kwargs)
        finally:
            pop_shape_memo()

    # Reports name the lines of users, and take those of jaxtyping for none.
    code = call.__code__.replace(co_filename=jaxtyping.__file__)
    own = FunctionType(code, _OF_JAXTYPING, call.__name__, None, call.__closure__)
    return functools.update_wrapper(own, function)


def _jaxtyped(*, typechecker, _original=jaxtyping.jaxtyped):
    """Stand in for what the import hook puts on each function and class of the packages."""

    def decorate(decorated):
        plain = inspect.isfunction(decorated) and not inspect.isgeneratorfunction(decorated)
        return _checked(decorated) if plain else _original(decorated, typechecker=typechecker)

    return decorate


jaxtyping.jaxtyped = _jaxtyped
sys.path.append(str(Path(__file__).parent))  # `tools`, `field` and `tests` are not installed
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 8)  # simulated, for what lies on a mesh
jax.config.update("jax_disable_most_optimizations", True)  # most of the time is taken by compiling
jax.config.update("jax_traceback_in_locations_limit", 0)  # compilers copy it many times
# Flax asks each value that is traced for its sharding, and JAX prints the operations that it comes
# from into an error that nobody sees: an eighth of the time.
partial_eval.DynamicJaxprTracer._origin_msg = lambda tracer: ""
if jax.__version_info__ < (0, 11):
    # As it is by the emitters of this XLA, and then by cutting each small program in 32. A newer
    # one does not know the first flag, and compiles no sooner for the second.
    flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    # This JAX makes a context of MLIR for each program, which takes a third of the time of one
    # operation. A newer one makes a context for several, as here.
    mlir.make_ir_context = _reused(mlir.make_ir_context)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has background jobs ignore interrupts, and the commands that the tests interrupt would
    # inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    """Add the options that say whether all cases run."""
    parser.addoption("--share", action="store_true", help="leave out cases of the longest grids")
    parser.addoption("--whole", action="store_true", help="run all of the longest grids")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what is not of the share, and count it as deselected."""
    no_file_named = config.args_source is not config.ArgsSource.ARGS
    wanted = no_file_named or config.getoption("--share")
    if config.getoption("--whole") or not wanted:
        return
    cases = defaultdict(list)
    for item in items:
        function, _, _ = item.nodeid.partition("[")
        cases[function].append(item)
    kept = {item for own in cases.values() for item in _share(own)}
    left_out = [item for item in items if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item in kept]


def _share(cases):
    """Return the cases of one test that run: at least one, unless none is to."""
    name = cases[0].nodeid
    each = next((each for prefix, each in SHARES.items() if name.startswith(prefix)), 1)
    if not each:
        return []
    # By its name, so that no parameter is left out by the order of the cases.
    chosen = [case for case in cases if zlib.crc32(case.nodeid.encode()) % each == 0]
    return chosen or cases[:1]


def pytest_collection_finish():
    """Collect garbage rarely, and never what is imported.

    Collecting among its million objects took a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture
def dtype_promotion():
    """Promote dtypes as JAX does by default: optax raises floats to integer counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def usual_promotion(dtype_promotion):
    """Promote dtypes and ranks as JAX does by default, on which other libraries rely."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def as_a_user_has_jax(usual_promotion):
    """Compute in float32, with JAX's own promotion: what documentation and examples run with."""
    with jax.enable_x64(False):
        yield


@pytest.fixture
def no_shape_checks():
    """Let shapes and types that are wrong on purpose reach the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def checkpoint_here(tmp_path, monkeypatch):
    """Work in a folder that holds `gpt2/`, a small model with a tokenizer.

    The examples of the documentation expect such a folder.
    """
    from flax import nnx
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from flax_attn.models import GPT2, GPT2Config

    words = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    config = GPT2Config(
        d_model=8, num_heads=2, num_layers=1, context_length=64, vocab_size=len(words)
    )
    GPT2(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save(str(tmp_path / "gpt2" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "gpt2"
