"""Numbers such as 1e-12 in one piece: browsers break lines after a hyphen."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

NUMBER = re.compile(r"(\d[\d.]*e-\d+x?)")
AS_IT_IS = (
    nodes.literal,
    nodes.literal_block,
    nodes.math,
    nodes.math_block,
    nodes.raw,
    nodes.title,
)


class Unbroken(SphinxPostTransform):
    """Put each such number of the text into an element that does not wrap."""

    default_priority = 900

    def run(self, **kwargs: Any) -> None:
        """Change the document."""
        for text in [text for text in self.document.findall(nodes.Text) if NUMBER.search(text)]:
            if not isinstance(text.parent, AS_IT_IS):
                parts = NUMBER.split(text)
                text.parent.replace(
                    text, [self._part(i, part) for i, part in enumerate(parts) if part]
                )

    def _part(self, index: int, part: str) -> nodes.Node:
        return nodes.inline(part, part, classes=["unbroken"]) if index % 2 else nodes.Text(part)


def setup(app: Any) -> dict[str, bool]:
    """Register the transform, as Sphinx asks of an extension."""
    app.add_post_transform(Unbroken)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
