"""Sphinx's configuration: docs/ and every README as one site.

    make docs-site

The source directory is the repository's root, so that links which work in the
repository work on the site; `include_patterns` lists the pages. Commands' help
and the Python API are read from the code while the site is built. Nothing is
fetched.
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))

project = "tunix-multi-turn"
author = "the authors"
html_title = "tunix-multi-turn"
extensions = [
  "command_help",
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
]
root_doc = "docs/index"
include_patterns = [
  "README.md",
  "CONTRIBUTING.md",
  "docs/*.md",
  "examples/README.md",
  "packages/*/README.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "tests", "tunix"]

# The page of measurements comes with them; links to absent pages are faults of
# another kind.
suppress_warnings = ["toc.not_readable"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# A shell's lines are indented, and are no Python.
highlight_language = "none"
pygments_style = "friendly"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# One parameter a line where a signature is longer.
maximum_signature_line_length = 72
# Backticks of docstrings are code.
default_role = "code"
napoleon_google_docstring = True
napoleon_use_ivar = True

html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("tables.js", {"defer": "defer"})]
html_search_scorer = str(ROOT / "docs" / "site" / "scorer.js")
html_theme_options = {"navigation_with_keys": True}
