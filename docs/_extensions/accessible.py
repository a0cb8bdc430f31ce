"""What the theme and Sphinx write that an accessibility checker rejects, mended in the page."""

from __future__ import annotations

import re
from typing import Any

# Sphinx writes the parameters of a long signature as a list of definitions without terms.
PARAMETERS = re.compile(r"<dl>\n((?:<dd>(?:(?!<dl|<dd).)*?</dd>\n)+)</dl>", re.DOTALL)


def parameters(html: str) -> str:
    """Return a page whose signatures have their parameters in lines, and not in lists."""

    def lines(match: re.Match[str]) -> str:
        inner = match[1].replace("<dd>", '<span class="parameter">').replace("</dd>", "</span>")
        return f'<span class="parameters">\n{inner}</span>'

    return PARAMETERS.sub(lines, html)


def mend(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Change a page before it is written."""
    if "body" in context:
        context["body"] = parameters(context["body"])


def setup(app: Any) -> dict[str, bool]:
    """Register the hook, as Sphinx asks of an extension."""
    app.connect("html-page-context", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
