"""Train a GPT-2 on all hosts of a pod: start the same command on each of them.

    python examples/train_multihost.py --mesh data=16,fsdp=4,tensor=4 --batch 64 \
        --checkpoints gs://bucket/run

On TPU pods, under Slurm and under Kubernetes JAX finds the other processes by itself. Elsewhere say
where they are, here two processes on one machine:

    for i in 0 1; do
        python examples/train_multihost.py --mesh data=2 --checkpoints build/multihost \
            --coordinator localhost:8476 --processes 2 --process $i &
    done; wait

`--processes 1` trains on one host alone. Process 0 prints the loss of each step, a line of JSON
each. If a process ends, the others end with an error, too. The same command resumes from the last
complete checkpoint, and so does one with another mesh or another number of processes: the data and
their order follow from `--seed` and the step alone. The folder of checkpoints must be one that all
hosts share.
"""

import argparse
import hashlib
import json
import math
import os
import pydoc_data.topics
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding

import flax_attn
from attn_spec.checks import check_positive
from flax_attn import GPT2, GPT2Config, from_pretrained
from flax_attn.models import LanguageModel
from flax_attn.plan.job import parse_mesh
from flax_attn.sharding import spec
from flax_attn.sharding.axes import mesh_axes
from flax_attn.sharding.parameters import create
from flax_attn.training import Checkpoints, train_step

CONFIG = GPT2Config(
    d_model=128, num_heads=4, num_layers=2, context_length=128, vocab_size=256, dropout=0.1
)
OWN = {"coordinator", "processes", "process"}  # arguments that processes need not have in common


def join(options: argparse.Namespace) -> None:
    """Connect to the other processes.

    From here on, this process ends if another one does, at the latest after the timeout.
    """
    jax.config.update("jax_enable_x64", options.float64)
    if options.processes == 1:
        return
    # XLA's own for CPUs joins the devices of one process alone.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX ends a process for which the others do not come, and does not say what it waited for.
    print(
        f"waits {options.timeout} s for {options.processes or 'all'} processes",
        file=sys.stderr,
        flush=True,
    )
    jax.distributed.initialize(
        options.coordinator,
        options.processes,
        options.process,
        initialization_timeout=options.timeout,
        heartbeat_timeout_seconds=options.timeout,
        shutdown_timeout_seconds=options.timeout,
    )


def check_processes(options: argparse.Namespace) -> None:
    """Raise on every process unless all agree on device count, arguments, text and JAX version."""
    check_devices(Counter(device.process_index for device in jax.devices()))
    # A difference would show as a hang, or as another loss: each process says what it has.
    own = {name: str(value) for name, value in vars(options).items() if name not in OWN}
    own |= {"sha256 of text": hashlib.sha256(options.text.read_bytes()).hexdigest()}
    own |= {"jax": jax.__version__, "flax_attn": flax_attn.__version__}
    check_same(dict(map(json.loads, gather(json.dumps([jax.process_index(), own])))))


def check_devices(counts: dict[int, int]) -> None:
    """Raise unless all processes have as many devices."""
    if len(set(counts.values())) > 1:
        parts = [f"{count} on process {process}" for process, count in sorted(counts.items())]
        raise ValueError(
            f"all processes must have as many devices; got {', '.join(parts)}. Start them on hosts"
            " of one kind"
        )


def check_same(settings: dict[int, dict[str, str]]) -> None:
    """Raise unless the settings of all processes are equal."""
    first = settings[0]
    for process, own in sorted(settings.items()):
        parts = []
        for name, value in first.items():
            if own[name] != value:
                parts.append(f"{name} {value} and {own[name]}")
        if parts:
            raise ValueError(
                "all processes must be started with the same arguments; got on process 0 and on"
                f" process {process}: {'; '.join(parts)}. Start every process with the same command"
            )


def gather(text: str) -> list[str]:
    """Return the texts of all processes."""
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(own)))
    # Arrays of one size alone can be gathered.
    found = multihost_utils.process_allgather(np.pad(own, (0, sizes.max() - len(own))))
    return [row[:size].tobytes().decode() for row, size in zip(found, sizes, strict=True)]


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """Return a mesh over the devices of all processes."""
    if math.prod(sizes.values()) != jax.device_count():
        raise ValueError(
            f"the sizes of --mesh must multiply to the number of devices, {jax.device_count()} "
            f"on {jax.process_count()} process(es); got {sizes}. Change a size"
        )
    # Auto: the compiler decides where intermediates lie, by what the parameters say.
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def load(options: argparse.Namespace, mesh: Mesh) -> tuple[LanguageModel, np.ndarray]:
    """Return the model, on the mesh, and the text as tokens: bytes for the small model."""
    dtype = jnp.float64 if options.float64 else jnp.float32
    if options.model is None:
        return small_model(options, mesh, dtype), byte_tokens(options.text)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    model = from_pretrained(options.model, mesh=mesh, param_dtype=dtype)
    model.train()
    text = options.text.read_text(encoding="utf-8")
    return model, np.array(tokenizer.encode(text).ids, np.int32)


def small_model(options: argparse.Namespace, mesh: Mesh, dtype: Any) -> LanguageModel:
    """Return a small GPT-2 with random weights, each process with the parts of its devices."""
    return create(lambda: GPT2(CONFIG, rngs=nnx.Rngs(options.seed), param_dtype=dtype), mesh)


def byte_tokens(file: Path) -> np.ndarray:
    """Return the bytes of a file as tokens."""
    return np.frombuffer(file.read_bytes(), np.uint8).astype(np.int32)


def batch_of(
    tokens: np.ndarray, shape: tuple[int, int], where: NamedSharding, key: tuple[int, int]
) -> jax.Array:
    """Return rows of the text from positions that the key decides.

    Each process cuts only the rows of its own devices.
    """
    rows, t = shape
    # Every process draws the same numbers, so that none has to tell the others.
    starts = np.random.default_rng(key).integers(0, len(tokens) - t + 1, rows)
    within = np.arange(t)

    def cut(part: tuple[slice, ...]) -> np.ndarray:
        of_rows, of_tokens = part
        return tokens[starts[of_rows, None] + within[None, of_tokens]]

    return jax.make_array_from_callback(shape, where, cut)


def make_batches(
    tokens: np.ndarray, t: int, options: argparse.Namespace, mesh: Mesh, done: int
) -> Iterator[Any]:
    """Yield the steps after `done`, each with its batch."""
    # The step is part of the key: what a run has read need not be stored.
    where = NamedSharding(mesh, spec(("batch", "tokens"), mesh))
    for step in range(done + 1, options.steps + 1):
        yield step, batch_of(tokens, (options.batch, t), where, (options.seed, step))


def check_divides(name: str, size: int, axis: str, mesh: Mesh) -> None:
    """Raise unless the mesh divides an axis of the batch."""
    sizes = {found: mesh.shape[found] for found in mesh_axes(axis, mesh)}
    if size % math.prod(sizes.values()):
        raise ValueError(
            f"{name} must be a multiple of what the mesh splits it into; got {name}={size} and"
            f" {sizes}. Change either"
        )


def train(options: argparse.Namespace) -> dict[int, float]:
    """Train from the last complete checkpoint to the last step; return the loss of each step."""
    mesh = make_mesh(parse_mesh(options.mesh))
    model, tokens = load(options, mesh)
    t = model.config.context_length
    check_divides("batch", options.batch, "batch", mesh)
    check_divides("context_length", t, "tokens", mesh)
    optimizer = create(make_optimizer, mesh, model)
    losses = {}
    with jax.set_mesh(mesh), Checkpoints(options.checkpoints) as checkpoints, end_at_once():
        done = 0
        if checkpoints.latest is not None:
            done, _ = checkpoints.restore(model, optimizer)
        for step, batch in make_batches(tokens, t, options, mesh, done):
            losses[step] = float(train_step(model, optimizer, batch))
            # All have the same loss: one of them prints it.
            if jax.process_index() == 0:
                print(json.dumps({"step": step, "loss": losses[step]}), flush=True)
            # All save: each writes the parts that its devices hold.
            if step % options.every == 0 or step == options.steps:
                checkpoints.save(step, model, optimizer)
    return losses


def make_optimizer(model: LanguageModel) -> nnx.Optimizer:
    """Return AdamW, whose state lies on the mesh as the parameters do."""
    return nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


@contextmanager
def end_at_once() -> Iterator[None]:
    """End the process on an error without waiting for the others.

    They may be waiting for this one, in a save or in the shutdown.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        if isinstance(error, jax.errors.JaxRuntimeError):
            print(
                f"process {jax.process_index()} ends: most likely another process ended, or cannot"
                " be reached. Start all processes again: they resume from the last complete"
                " checkpoint",
                file=sys.stderr,
            )
        # An exit of Python would wait for the others.
        sys.stderr.flush()
        os._exit(1)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description="Train a GPT-2 on all hosts of a pod.")
    add = parser.add_argument
    add(
        "--mesh",
        required=True,
        help="sizes of data, fsdp, tensor and context: data=16,tensor=4; all devices together",
    )
    add(
        "--checkpoints",
        required=True,
        help="a folder that all processes share; a run in it is resumed",
    )
    add(
        "--model",
        type=Path,
        help="a Hugging Face folder with tokenizer.json; left out, a small GPT-2 on bytes",
    )
    add(
        "--text",
        type=Path,
        default=Path(pydoc_data.topics.__file__),
        help="a file (default: Python's help topics)",
    )
    add("--batch", type=int, default=8, help="rows of a step on all devices together (default 8)")
    add("--steps", type=int, default=100, help="in all (default 100)")
    add("--every", type=int, default=20, help="how many steps lie between checkpoints (default 20)")
    add(
        "--seed",
        type=int,
        default=0,
        help="of the parameters of the small GPT-2 and of the order of the data",
    )
    add("--float64", action="store_true", help="compute in float64, to compare runs")
    add(
        "--timeout",
        type=int,
        default=100,
        help="seconds in which a process must start, and answer ever after (100)",
    )
    add(
        "--coordinator", help="host:port of process 0; where a cluster tells, leave out these three"
    )
    add("--processes", type=int, help="how many there are; 1 trains without others")
    add("--process", type=int, help="the index of this one")
    options = parser.parse_args(arguments)
    names = ("batch", "steps", "every", "timeout")
    check_positive(**{name: getattr(options, name) for name in names})
    return options


def main(arguments: list[str] | None = None) -> dict[int, float]:
    """Join the other processes, train, and return the loss of each step."""
    options = parse(arguments)
    join(options)
    with end_at_once():
        check_processes(options)
        losses = train(options)
    if options.processes != 1:
        jax.distributed.shutdown()
    return losses


if __name__ == "__main__":
    main()
