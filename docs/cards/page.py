"""The cards as Markdown with MyST's directives."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from IPython.display import Markdown

from cards.card import Card
from cards.picture import svg
from cards.proof import recorded, worst
from cards.run import Outcome, run
from flax_attn.parity import tolerance


def shown(cards: Iterable[Card]) -> Markdown:
    """Return the cards of a group as the output of a cell."""
    return Markdown(markdown(cards))


def markdown(cards: Iterable[Card]) -> str:
    """Return the cards of a group, run and drawn, as a grid."""
    rows = recorded()
    body = "\n".join(item(card, run(card), rows) for card in cards)
    return f"``````{{grid}} 1 1 2 2\n:gutter: 3\n\n{body}\n``````\n"


def item(card: Card, outcome: Outcome, rows: dict[str, dict[str, str]]) -> str:
    """Return one card."""
    caption = f"{card.slug}-caption"
    picture = svg(outcome.picture, card.axes, caption)
    facts = "\n".join(f"{name}\n: {text}\n" for name, text in facts_of(card, outcome, rows))
    return f"""`````{{grid-item-card}} {card.name}
:class-card: gallery-card

({card.slug})=
{card.take}

```{{raw}} html
<figure class="gallery-picture">{picture}<figcaption id="{caption}">{card.alt}</figcaption></figure>
```

```text
{narrow(card.shown_formula)}
```

```python
{card.example}
```

{facts}
`````
"""


def facts_of(
    card: Card, outcome: Outcome, rows: dict[str, dict[str, str]]
) -> Iterable[tuple[str, str]]:
    """Return what is listed below an example: names and texts."""
    yield "API", ", ".join(f"{{py:obj}}`~flax_attn.{name.split('.')[0]}`" for name in card.shows)
    yield "In PyTorch", f"`{card.equals}`: error {outcome.error:.1e}, limit {tolerance.FORWARD:.0e}"
    if card.proof:
        proven = worst(card.proof, rows)
        errors = ", ".join(f"{check} {error:.1e}" for check, error in proven.errors.items())
        names = ", ".join(f"`{name}`" for name in card.proof)
        yield "Tested as", f"{names}: {errors}, margin {proven.margin:g}x"
    yield "From", "; ".join(map(linked, card.references))


def narrow(formula: str, width: int = 48) -> str:
    """Return a formula in lines that fit a card.

    Spaced-out parts and overlong parts move to lines of their own.

    Example:
        >>> print(narrow("a = b    with b = 1"))
        a = b
            with b = 1
    """
    lines = re.sub(r"(?<=,) {2,}", "\n", re.sub(r"(?<=\S) {3,}(?=\S)", "\n    ", formula)).split(
        "\n"
    )
    kept = {"subsequent_indent": "        ", "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(part for line in lines for part in textwrap.wrap(line, width, **kept))


def linked(reference: str) -> str:
    """Return a reference whose arXiv ids are links.

    Example:
        >>> linked("Su et al. 2021 (arXiv:2104.09864)")
        'Su et al. 2021 ([arXiv:2104.09864](https://arxiv.org/abs/2104.09864))'
    """
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", reference)
