"""Place two notebook cells side by side: one tagged `torch`, and the next, tagged `flax`."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform


class Pairs(SphinxTransform):
    """Wrap each pair of cells in a container of class `pair`, which the style sheet lays out."""

    default_priority = 900

    def apply(self, **kwargs: Any) -> None:
        """Change the document."""
        for torch in [
            cell
            for cell in self.document.findall(nodes.container)
            if "tag_torch" in cell["classes"]
        ]:
            flax = torch.next_node(descend=False, siblings=True)
            if flax is None or "tag_flax" not in flax.get("classes", ()):
                raise ValueError(
                    "a cell tagged torch needs a cell tagged flax directly after it; "
                    f"{self.env.docname} has none after:\n{torch.astext()}"
                )
            torch.replace_self(pair := nodes.container(classes=["pair"]))
            flax.parent.remove(flax)
            pair += [torch, flax]
            # The room of the page's own table of contents goes to the second column.
            self.env.metadata[self.env.docname]["html_theme.sidebar_secondary.remove"] = "true"


def setup(app: Any) -> dict[str, bool]:
    """Register the transform, as Sphinx asks of an extension."""
    app.add_transform(Pairs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
