"""Render formulas as MathML, which browsers draw without scripts or downloads."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def _inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Element) -> None:
    formula = tex2mathml(node.astext(), as_block=True)
    # A formula that is wider than its column scrolls, which a keyboard must reach.
    writer.body.append(
        f'<div class="math" tabindex="0" role="group" aria-label="formula">{formula}</div>'
    )
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer, as Sphinx asks of an extension."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(_inline, None), block_renderers=(_block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
