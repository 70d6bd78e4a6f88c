"""The site: `python -m sphinx -W docs build/site`, without network. CONTRIBUTING.md says how pages are written."""

import sys
from pathlib import Path

import spmd

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "extensions"))

project = "spmd"
author = "The spmd authors"
project_copyright = "2026, The spmd authors"
release = version = spmd.__version__

extensions = ["myst_parser", "notebooks", "reference_pages", "site_links", "spellings"]
exclude_patterns = ["tools", "extensions"]
nitpicky = True
smartquotes = False  # texts from errors hold code
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"spmd {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/versions.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
