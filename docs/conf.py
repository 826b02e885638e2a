"""The site: how Sphinx reads these pages. ``make docs`` builds it.

The pages are plain Markdown, which a code host shows too. What only a site can do is added while they are read: the
Python blocks of a page run, one after the other in a process of its own, and what they print and draw follows them; a
public name becomes a link to a page made of its docstring; and the files at the top of the repository become pages.
"""

import gc
import hashlib
import logging
import os
import re
import sys
from functools import cache, partial
from pathlib import Path

import furo
from jupyter_cache import get_cache
from sphinx.search.en import SearchEnglish

DOCS = Path(__file__).parent
BUILT = DOCS / "_build"
KERNEL = BUILT / "ipython" / "profile_default" / "ipython_kernel_config.py"
KERNEL.parent.mkdir(parents=True, exist_ok=True)
KERNEL.write_text("c.Application.log_level = 40\n")  # it warns of its transport at each start
PICTURES = DOCS / "matplotlibrc"  # by its name too, as pages run in folders of their own
# Of the processes in which pages run: no accelerator, nothing of the user's own, and tables as wide as a page.
# It stands before the imports of libraries, as pages run in forks of this process.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "IPYTHONDIR": str(BUILT / "ipython"),
    "MATPLOTLIBRC": str(PICTURES),
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "COLUMNS": "92",
    "OPENBLAS_NUM_THREADS": "1",
}
logging.basicConfig()  # else a package of the theme does, and all that any package logs as INFO is shown
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import make_inventories  # noqa: E402  # it lies here, as the extension "drawings" does
from implied_pages import (  # noqa: E402
    AT_THE_TOP,
    gallery_with_pages,
    groups_of_api,
    groups_of_index,
    messages_by_letter,
    public_names,
    with_keywords,
    write_pages,
)

import xlstm_jax  # noqa: E402

# Pages become many objects that live until the end, and each collection looks at all of them: a sixth of Sphinx's time.
gc.freeze()
gc.set_threshold(200_000, 20, 100)


def _digest_of_the_library():
    """What a page prints may change with the library and with the results, and so may what is kept of its last run."""
    package, results = Path(xlstm_jax.__file__).parent, DOCS.parent / "benchmarks" / "results"
    files = sorted([*package.rglob("*.py"), *results.rglob("*.json"), PICTURES])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


project = "xlstm_jax"
version = release = xlstm_jax.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "drawings",
    "forked_kernels",
    "anchors",
]
exclude_patterns = ["_build", "notebooks"]  # notebooks are written from pages, and linked as files
html_theme = "furo"
furo._compute_navigation_tree = lambda context: ""  # of all pages, for each page, which our sidebar does not show
SearchEnglish.stem = cache(SearchEnglish.stem)  # pages repeat their words
html_title = f"{project} {version}"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_favicon = "_static/favicon.svg"
html_show_copyright = False
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_show_sphinx = html_show_sourcelink = html_copy_source = False
pygments_dark_style = "github-dark"

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]
nb_execution_mode = "cache"
nb_execution_cache_path = str(BUILT / "executed" / _digest_of_the_library())
nb_execution_timeout = 300  # seconds for one block
nb_execution_show_tb = True  # of a page that fails, which is a warning, and so fails the build when all pages have run
nb_merge_streams = True
nb_render_markdown_format = "myst"  # of tables that a page makes
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
nb_output_stderr = "remove-warn"  # and a warning fails the build

intersphinx_mapping = {
    project: (address, f"inventories/{project}.inv") for project, (address, _) in make_inventories.PROJECTS.items()
}

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

CODE = re.compile(r"(?<!`)``([^`]+)``(?!`)")  # of a docstring
INLINE = re.compile(r"(?<![`\[])`([\w.]+)`(?!`)")  # of a page, but for the text of a link
PYTHON = re.compile(r"^```python$", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$|^#.*?$)", re.MULTILINE | re.DOTALL)  # blocks and headings
STARRED = re.compile(r"(?<![\w*(])(\*{1,2})(?=[a-z])")  # *args, **kwargs in prose, which is no emphasis
PAGE = re.compile(r"(?:``)?docs/([\w/]+)\.md(?:``)?")  # a link, in a docstring
# Doctests have a mesh without making it (conftest.py); a reader sees where it comes from.
MESH = 'mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})'
USES_MESH, MAKES_MESH = re.compile(r"\bmesh\b(?!=)"), re.compile(r"\bmesh(, \w+)* = |\bas mesh\b")
STRIDE = 8
# XLA compiles each loop of a program through MLIR, and cuts some into tiles. Without tiles compiling takes a sixth
# less; without MLIR, which only the XLA of JAX 0.10 can do, a quarter of the time.
SIMPLE_LOOPS = "xla_cpu_disable_tiled_emitter=true,xla_cpu_disable_new_fusion_emitters=true"
# Most programs of pages run a few times, and take longer to compile. On these pages they run often, or are timed.
OPTIMIZED = {"tutorials/generation", "howto/profile", "howto/slow_step"}


@cache
def outside():
    """The pages of names of JAX, Flax, optax, NumPy and Python."""
    return make_inventories.addresses()


def make_the_cache(app):
    """The database of pages that ran is made here: two workers that each find none would both make its tables."""
    del app
    get_cache(nb_execution_cache_path).db  # noqa: B018  # made when it is first asked for


def spread_pages(app, env, names):
    """Each worker reads a part of the list of pages: those that run long, as tutorials, must not be one part."""
    del app, env
    names[:] = [name for first in range(STRIDE) for name in names[first::STRIDE]]


def read_for_the_site(app, page, source):
    """What only the site has, added to a page that is read."""
    del app
    text = _from_the_top(page) if page in AT_THE_TOP else source[0]
    top = "../" * page.count("/")
    for name, file in AT_THE_TOP.items():
        text = re.sub(rf"\]\((\.\./)*{re.escape(file)}", f"]({top}{name}.md", text)
    names = [name for _, name, _ in public_names()]
    if page == "api":
        text = groups_of_api(text)
    elif page == "index":
        text = groups_of_index(text)
    elif page == "gallery/index":
        text = gallery_with_pages(text)
    elif not page.startswith(("reference/", "contents/")):
        text = _with_links(text, {name: f"{top}reference/{name}.md" for name in names} | outside())
        text = messages_by_letter(text) if page == "troubleshooting" else text
        if page not in AT_THE_TOP and PYTHON.search(text):
            text = _executed(page, text)
    # A notebook is a file to download: its page is the tutorial.
    text = re.sub(r"\[([^\]]+)\]\(((?:\.\./)*notebooks/\w+\.ipynb)\)", r"{download}`\1 <\2>`", text)
    source[0] = with_keywords(page, text)


def _executed(page, text):
    """The page as a notebook. It may leave files behind, which go with the folder that it runs in.

    On the page of results the code is folded: one comes for the tables.
    """
    folded = "\n:tags: [hide-input]" if page == "results" else ""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    if page not in OPTIMIZED:
        os.environ["XLA_FLAGS"] += f" --xla_backend_optimization_level=0 --xla_backend_extra_options={SIMPLE_LOOPS}"
    head = "---\nfile_format: mystnb\nkernelspec: {name: python3}\nmystnb: {execution_in_temp: true}\n---\n"
    return head + PYTHON.sub("```{code-cell} python" + folded, text)


def _with_links(text, targets):
    """The page with the first mention of each of these names under a heading as a link to its page."""
    parts, left = FENCED.split(text), dict(targets)
    for i, part in enumerate(parts):
        if part.startswith("#"):
            left = dict(targets)
        elif not part.startswith("```"):
            parts[i] = INLINE.sub(partial(_link, left), part)
    return "".join(parts)


def _link(left, found):
    target = left.pop(found[1], None)
    return f"[{found[0]}]({target})" if target else found[0]


def _from_the_top(page):
    """A file from above this folder, as if it lay in it."""
    file = DOCS.parent / AT_THE_TOP[page]
    folder = "" if file.parent == DOCS.parent else f"{file.parent.name}/"

    def moved(found):
        target = found[1]
        if target.startswith("docs/") or target in AT_THE_TOP.values():
            return f"]({target.removeprefix('docs/')}"
        return f"](../{folder}{target}"

    return re.sub(r"\]\((?!https?:|#|\.\./)([^)#]+)", moved, file.read_text())


def read_docstring(app, what, name, value, options, lines):
    """Escapes the stars of ``*args`` in prose, makes links of names and pages, and has examples make their mesh."""
    del app, what, value, options
    others = {one: f"{face}.{one}" for face, one, _ in public_names() if one != name.rsplit(".", 1)[-1]}
    others |= {one: one for one in outside()}

    def code(found):
        return f":py:obj:`{found[1]} <{others[found[1]]}>`" if found[1] in others else found[0]

    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = CODE.split(line)  # prose and code by turns
            parts[::2] = [STARRED.sub(lambda stars: stars[1].replace("*", r"\*"), prose) for prose in parts[::2]]
            parts[1::2] = [f"``{text}``" for text in parts[1::2]]
            lines[i] = PAGE.sub(r":doc:`/\1`", CODE.sub(code, "".join(parts)))
    examples = [i for i, line in enumerate(lines) if line.lstrip().startswith((">>>", "..."))]
    code_of_all = "\n".join(lines[i] for i in examples)
    if USES_MESH.search(code_of_all) and not MAKES_MESH.search(code_of_all):
        indent = lines[examples[0]].partition(">>>")[0]
        lines.insert(examples[0], f"{indent}>>> {MESH}")


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", make_the_cache)
    app.connect("builder-inited", write_pages)
    app.connect("env-before-read-docs", spread_pages)
    app.connect("source-read", read_for_the_site)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon reads it
