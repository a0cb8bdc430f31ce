"""How Hugging Face stores the models of one family: the record for the loader."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_spec.hugging_face.fields import Fields
from flax_attn.convert.headers import Stored
from flax_attn.convert.rules import Layout, Rule

Read = Callable[[Fields, float | None], Any]


@dataclass(frozen=True)
class Family:
    """How Hugging Face stores the models of one family.

    Args:
        read: for each `model_type`, the function from the fields of `config.json`, and the
            probability of dropout that replaces the file's unless it is None, to a config.
        write: the function from a config to the fields of `config.json`. It raises `ValueError`
            where transformers does not compute what the config says.
        layout: the names of the weights in a file, and how they are stored.
        others: other layouts that files may have; models are stored in `layout`.
        base: prefix of every weight but the head, which files of the model without its head leave
            out.
        anchor: one of our parameters that every file holds: by its name there the prefix is found.
        architecture: the class of transformers that computes the same, as `architectures` of
            `config.json` names it; needed where several of our classes read one `model_type`.
        fit: the function from a config and the entries of the files, by name, to the config of what
            is there, for layers that `config.json` does not tell of. It raises `ValueError` where a
            model of the config would take memory before its shapes are compared.
        copies: names of weights that files may hold though they are one of our parameters, each
            with its name; a prefix may stand before.

    Example:
        >>> from flax_attn.models import Llama
        >>> list(Llama.family.read)
        ['llama', 'mistral']
    """

    read: Mapping[str, Read]
    write: Callable[[Any], dict[str, Any]]
    layout: Layout
    others: tuple[Layout, ...] = ()
    base: str = "model."
    anchor: str = "tok_emb.embedding"
    architecture: str = ""
    fit: Callable[[Any, Mapping[str, Stored]], Any] = lambda config, stored: config
    copies: Mapping[str, str] = field(
        default_factory=lambda: {"lm_head.weight": "tok_emb.embedding"}
    )


def linears(
    names: Mapping[str, str], ours: str = "", theirs: str = "", *, pattern: str = "i o -> o i"
) -> tuple[Rule, ...]:
    """Return the rules of linear layers, theirs by ours, all behind a prefix on each side.

    `pattern` takes our kernel to their weight.

    Example:
        >>> [rule.theirs for rule in linears({"out_head": "lm_head"})]
        ['lm_head.weight', 'lm_head.bias']
    """
    names = {ours + own: theirs + other for own, other in names.items()}
    return *_rules(names, "kernel", "weight", pattern), *_rules(names, "bias", "bias")


def norms(names: Mapping[str, str], ours: str = "", theirs: str = "") -> tuple[Rule, ...]:
    """Return the rules of norms, theirs by ours, all behind a prefix on each side.

    Example:
        >>> [rule.theirs for rule in norms({"final_norm": "model.norm"})]
        ['model.norm.weight', 'model.norm.bias']
    """
    names = {ours + own: theirs + other for own, other in names.items()}
    return *_rules(names, "scale", "weight"), *_rules(names, "shift", "bias")


def embeddings(names: Mapping[str, str], ours: str = "", theirs: str = "") -> tuple[Rule, ...]:
    """Return the rules of embeddings, theirs by ours, all behind a prefix on each side.

    Example:
        >>> [rule.theirs for rule in embeddings({"tok_emb": "model.embed_tokens"})]
        ['model.embed_tokens.weight']
    """
    names = {ours + own: theirs + other for own, other in names.items()}
    return _rules(names, "embedding", "weight")


def _rules(
    names: Mapping[str, str], own_part: str, their_part: str, pattern: str = ""
) -> tuple[Rule, ...]:
    """Return a rule for one parameter of each layer."""
    pairs = names.items()
    return tuple(Rule((f"{a}.{own_part}",), f"{b}.{their_part}", pattern) for a, b in pairs)
