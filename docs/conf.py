"""The site: Markdown pages, tutorials that run when it is built, and a reference from the docstrings.

`make docs` builds it; warnings are errors. Pages of docs/ are read on their own as well, in an editor or where the
repository is browsed, so what Sphinx needs beyond that is in `_ext`.
"""

import logging
import os
import sys
from pathlib import Path

import snarenet

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
sys.path.insert(0, str(HERE / "_ext"))

project, author = "snarenet", "The snarenet authors"
copyright = "the snarenet authors, MIT licence"
version = release = snarenet.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "formulas",
    "repository",
]
exclude_patterns = ["_ext", "explorer"]

PARTS = {"results": "results/*", "howto/index": "*", "doors/index": "*"}

# Markdown
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

# tutorials: executed in a folder of their own, an error in one stops the build
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 600  # seconds a cell: machines may be busy
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_code_prompt_show, nb_code_prompt_hide = "▸ the code of the figure", "▾ the code of the figure"
copybutton_exclude = ".linenos, .gp, .go"

# their figures: vector graphics in the style of docs/_static/matplotlibrc
profile = BUILD / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text(
    'c.InlineBackend.figure_formats = {"svg"}\nc.IPKernelApp.log_level = "ERROR"\n'
)
logging.getLogger("traitlets").setLevel(logging.WARNING)
os.environ |= {"IPYTHONDIR": str(profile.parent), "MATPLOTLIBRC": str(HERE / "_static" / "matplotlibrc")}

# the reference
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["botorch", "gymnasium", "lightning", "sklearn"]  # of snarenet.doors: not needed to read it
autodoc_typehints_format = "short"
autodoc_type_aliases = {
    name: name
    for name in ("Callback", "Count", "Datum", "Keep", "Ratio", "Seconds", "Setting", "Share", "Size", "Weight")
}
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_use_ivar = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False

# looks
html_theme = "furo"
html_title = "snarenet"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False


def _list_parts(app, page, source):
    """Pages that are parts of another one go below it in the contents; where they stand, it links to them itself."""
    if page in PARTS:
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{PARTS[page]}\n```\n"


def setup(app):
    """What is no setting."""
    app.connect("source-read", _list_parts)
