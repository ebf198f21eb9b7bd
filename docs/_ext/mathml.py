"""Equations as MathML, which browsers draw themselves: nothing is fetched or run."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def _inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(self: HTML5Translator, node: nodes.math_block) -> None:
    # Room for a sum's limits, which would be cut off where wide equations scroll.
    self.body.append('<div class="math" style="padding: 0.5em 0">')
    text = node.astext().replace("{aligned}", "{align*}")  # the name that is known
    self.body.append(convert(text, display="block") + "</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Make it the renderer of equations."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
