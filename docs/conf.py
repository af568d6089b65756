"""How Sphinx builds these pages: ``sphinx-build -W docs build/docs``."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

project = "distprune"
author = "the distprune authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "directives"]
html_theme = "furo"
html_title = "distprune"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # of torch, whose markup is not ours

smartquotes = False  # of options, two hyphens are two hyphens
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:class",
        r"(torch|nn|torch_prune|numpy|collections|pathlib)\..*|Path|DeviceMesh",
    ),  # no inventory of theirs is at hand offline
    ("py:class", r"(distprune\.[a-z_]+\.[\w.]+|optional|ShrinkHooks|NamedWeights|Optimizer)"),  # below the public names
]
