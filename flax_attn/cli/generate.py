"""`flax-attn generate`: text from a checkpoint folder."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from attn_spec.hugging_face.fields import NOTHING_DOWNLOADED
from flax_attn.cli import common, compile_cache
from flax_attn.cli.common import UsageError, usage_errors
from flax_attn.cli.startup import Startup


def add(commands: Any) -> None:
    """Add the command."""
    generate = commands.add_parser(
        "generate",
        help="continue a text with a checkpoint from a local folder",
        description=(
            "Continue a text with a checkpoint from a local Hugging Face folder: config.json of any"
            " family that flax_attn has, safetensors and tokenizer.json. The text is written as it"
            " is made; nothing is downloaded."
        ),
    )
    generate.add_argument(
        "--model", metavar="DIR", required=True, help="the folder of the checkpoint"
    )
    generate.add_argument("--prompt", required=True, help="the text to continue")
    generate.add_argument(
        "--max-new-tokens", type=common.count, default=100, help="at most (default 100)"
    )
    generate.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the most likely token (default 0)"
    )
    generate.add_argument(
        "--top-k", type=common.count, help="draw from this many of the most likely tokens"
    )
    generate.add_argument(
        "--top-p",
        type=float,
        help="draw from the most likely tokens that have this probability together",
    )
    generate.add_argument(
        "--seed", type=common.seed, default=0, help="of what is drawn (default 0)"
    )
    generate.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; default: as stored",
    )
    generate.add_argument(
        "--weights",
        choices=("int8", "stored"),
        help=(
            "hold matrices in 8 bits, with a scale for each column, or in the 8 or 4 bits of the"
            " folder; default: in floats"
        ),
    )
    generate.add_argument(
        "--no-compile-cache",
        dest="compile_cache",
        action="store_false",
        help="do not keep compiled programs in the user's cache directory for the next start",
    )
    generate.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> int:
    import jax.numpy as jnp

    from flax_attn.models import from_pretrained, generate

    if options.compile_cache:
        compile_cache.switch_on()
    # What can be refused is, before the weights are read.
    tokenizer = _tokenizer(Path(options.model))
    stops = _stop_tokens(Path(options.model))
    prompt = _ids_of(tokenizer, _text(options.prompt))
    startup = Startup()
    printer = _Printer(tokenizer, startup)
    began = time.monotonic()
    with usage_errors(ValueError, OSError):
        model = from_pretrained(
            options.model, param_dtype=options.dtype, dropout=0.0, weights=options.weights
        )
    startup.load = time.monotonic() - began
    # Some files name an end that is no token of the model.
    size = getattr(model.config, "vocab_size", 0)
    stops = [token for token in stops if 0 <= token < size]
    with usage_errors(ValueError):
        generate(
            model,
            prompt,
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop_tokens=stops,
            key=jnp.array([0, options.seed], jnp.uint32) if options.temperature else None,
            callback=printer,
        )
    printer.close()
    return 0


class _Printer:
    """Writes text as its tokens come: a character may take several of them."""

    def __init__(self, tokenizer: Any, startup: Startup):
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.stream, self.startup = (
            tokenizer,
            DecodeStream(skip_special_tokens=True),
            startup,
        )

    def __call__(self, row: int, token: int) -> None:
        sys.stdout.write(self.stream.step(self.tokenizer, token) or "")
        sys.stdout.flush()
        self.startup.add_token()

    def close(self) -> None:
        print(flush=True)
        for name, figure in self.startup.rows():
            print(f"{name:<12} {figure}", file=sys.stderr)


def _text(prompt: str) -> str:
    """Return a prompt of the command line as UTF-8 text, whatever the encoding of the system."""
    try:
        return os.fsencode(prompt).decode("utf-8")
    except UnicodeError as error:
        raise UsageError(f"--prompt must be text in UTF-8; {error}") from None


def _tokenizer(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("text needs the tokenizers library: pip install tokenizers") from None
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}. {NOTHING_DOWNLOADED}")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UsageError(
            f"no tokenizer at {path}: text needs the tokenizer.json that the model was trained with"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UsageError(
            f"{path} is not a tokenizer that the tokenizers library reads: {error}"
        ) from None


def _ids_of(tokenizer: Any, prompt: str) -> list[int]:
    try:
        return tokenizer.encode(prompt).ids
    except Exception as error:  # tokenizers raises nothing narrower
        raise UsageError(
            f"the tokenizer of the model does not take the prompt {prompt!a}: {error}. "
            "Pass other text, or copy tokenizer.json once more"
        ) from None


def _stop_tokens(folder: Path) -> list[int]:
    """Return the ids that end a text, as generation_config.json says, or else config.json."""
    from attn_spec.json_files import read_object

    # The first overrides the second in transformers, even if it names other tokens.
    for path in (folder / "generation_config.json", folder / "config.json"):
        if not path.is_file():
            continue
        with usage_errors(ValueError):
            values = read_object(path)
        found = values.get("eos_token_id")
        if found is not None:
            return _ids(path, found if isinstance(found, list) else [found])
    return []


def _ids(path: Path, found: list[Any]) -> list[int]:
    if not all(type(token) is int for token in found):
        raise UsageError(
            f"{path}: eos_token_id must be one integer or a list of them; got {json.dumps(found)}."
            " Correct it"
        )
    return found
