"""How Sphinx builds the site: `make docs`."""

import os
import sys
from pathlib import Path

from jupyter_client import KernelManager

from flax_attn import __version__

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

# For the processes that run the notebooks: they show what a CPU gives, and do not fight for its
# cores.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each program runs once: optimising it takes longer than running it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

project = "flax_attn"
author = "the authors of flax_attn"
version = release = __version__
language = "en"

extensions = [
    "accessible",
    "docstrings",
    "llms",
    "mathml",
    "myst_nb",
    "pairs",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "symbols",
    "unbroken",
]
exclude_patterns = ["_extensions", "_static", "cards"]
nitpicky = True

# Signatures are those of the source (docstrings.py); the overloads of each are left out.
autodoc_typehints = "none"
autodoc_inherit_docstrings = False  # those of torch.nn.Module
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
napoleon_custom_sections = ["Returns", "Shapes"]  # text, without a type before a colon

# Markdown as code hosts read it, with formulas, definition lists and directives between colons.
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

# Every notebook is run at every build, and one that raises an error fails it.
# Without encryption each kernel warns of what it sends over TCP.
KernelManager.transport_encryption.default_value = "auto"
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

html_theme = "sphinx_book_theme"
html_title = "flax_attn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = html_logo = "_static/mark.svg"
html_copy_source = False
html_use_index = False
html_show_copyright = False
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_theme_options = {
    "home_page_in_toc": True,
    "logo": {"text": "flax_attn"},
    "navbar_persistent": [],  # the search stands at the side
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
copybutton_exclude = ".linenos, .gp, .go"
