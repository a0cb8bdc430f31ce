"""Where the command line keeps compiled programs: the next start loads them."""

import hashlib
import platform
import sys
from pathlib import Path

from flax_attn.bench import processor
from flax_attn.cli import common

_LIMIT = 2**30  # bytes; those not used for longest are deleted


def switch_on() -> None:
    """Cache what JAX compiles in the user's cache directory, unless JAX is configured otherwise.

    `JAX_COMPILATION_CACHE_DIR` names another directory, and `JAX_ENABLE_COMPILATION_CACHE=false`
    switches it off.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        try:
            folder = directory()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # no home, or one that cannot be written to
            print(
                f"flax-attn: compiled programs are not kept: {error}. Set XDG_CACHE_HOME",
                file=sys.stderr,
            )
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", _LIMIT)
    # JAX's default keeps programs of more than a second alone, and a start compiles many of less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def directory() -> Path:
    """Return the directory of this processor in the user's cache.

    Programs compiled for another processor may not run here.
    """
    # The programs of a shared home directory may come from machines of several kinds.
    return (
        common.cache_folder() / "programs" / hashlib.sha256(_processor().encode()).hexdigest()[:16]
    )


def _processor() -> str:
    # The flags: a virtual machine may hide instructions of the processor that it names.
    known = processor.lines("model name", "flags", "Features")
    return "\n".join(known) or f"{platform.machine()} {platform.processor()}"
