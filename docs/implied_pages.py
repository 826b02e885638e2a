"""Writes the implied pages: a page for each public name, group of names, group of pages and program of the gallery.

``index.md`` lists the pages in groups, and ``api.md`` lists the public names. The site's sidebar shows the groups, and
the page of a group lists its members. ``KEYWORDS`` adds search words to pages.
"""

import html
import importlib
import math
import re
import shutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

import write_gallery

DOCS = Path(__file__).parent
AT_THE_TOP = {
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "benchmarks": "benchmarks/README.md",
}
HEADING = re.compile(r"^##(#?) (.+)$", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)
ONE_SCREEN = 20  # links, on a telephone
SMALL_WORDS = "a|an|and|has|is|it|of|the|was"
QUESTION = re.compile(r"# .*\n\n(?:\*+([^*]+\?)\*|((?:[^?.*]|\.(?!\s))+\?))")
# Group of pages in index.md: caption and entries.
GROUP = re.compile(r"^```\{toctree\}\n:caption: ([^\n]*)\n:maxdepth: 1\n\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Search words by page. If a query is a main index entry, Sphinx's search lists the page of the entry first. The query
# must be part of the entry, so each spelling ("multi-host", "multi host") needs an entry.
KEYWORDS = {
    "howto/find_a_nan": ("NaN", "inf", "not finite", "debug_nans"),
    "howto/out_of_memory": ("out of memory", "OOM", "RESOURCE_EXHAUSTED"),
    "dtypes": ("bfloat16", "mixed precision", "dtype"),
    "howto/float16": ("float16", "loss scale", "DynamicScale"),
    "howto/contrastive": ("contrastive", "CLIP", "SigLIP", "Barlow Twins", "global batch"),
    "averaging": ("EMA", "exponential moving average"),
    "howto/stop_and_resume": ("resume", "restart", "Ctrl-C", "SIGTERM", "preemption"),
    "tutorials/machines": (
        "multi-host", "multi host", "multihost", "multi-node", "several hosts", "Slurm", "Kubernetes",
    ),
    "howto/slow_step": ("slow", "performance", "MFU", "profiler"),
    "howto/weight_decay": ("weight decay", "mask"),
    "howto/flat_axis": ("all-reduce", "reduce-scatter", "one axis", "copies of gradients", "TPU slice"),
    "howto/small_leaves": ("packing", "latency", "number of collectives", "many small parameters"),
    "howto/within_hosts": ("between hosts", "slow network", "reshard_after_forward", "intra-node", "ZeRO++"),
    "howto/compilation_cache": ("compilation cache", "compile time", "recompile"),
    "howto/notebooks": ("notebook", "Jupyter", "Colab"),
    "howto/own_step": ("own step", "custom step", "training loop"),
    "howto/data": ("data loader", "dataset", "grain"),
    "howto/log": ("wandb", "TensorBoard", "logging"),
    "howto/export": ("safetensors", "export", "convert checkpoint", "convert weights"),
    "howto/publish": ("weight transfer", "weight sync", "publish weights", "rollout", "vLLM"),
    "frozen": ("freeze", "fine-tuning"),
    "howto/quantised_base": ("QLoRA", "qwix", "int4", "quantise weights"),
    "howto/mesh": ("mesh", "HSDP", "which axes", "parallelism", "3D parallel"),
    "check_step": ("test", "debug"),
    "howto/wrong_numbers": ("silent data corruption", "SDC", "bit flip", "faulty device"),
    "evaluation": ("another mesh", "evaluate on another mesh"),
    "howto/gan": ("GAN", "discriminator"),
    "howto/dpo": ("DPO", "reference model", "preference"),
    "howto/distill": ("distillation", "teacher"),
    "howto/actor_critic": ("actor critic", "reinforcement learning"),
    "howto/which_axes": ("MaxText",),
    "howto/local_checkpoints": (
        "near checkpoint", "NearCheckpointer", "emergency checkpoint", "local checkpoint", "multi-tier", "lost host",
    ),
    "fp8": ("fp8", "float8", "Fp8DotGeneralOp", "AQT", "int8 product", "TransformerEngine"),
    "kernels": ("flash attention", "splash attention", "Pallas"),
    "lookups": ("embedding table",),
    "tutorials/diffusion": ("diffusion", "DDPM", "DDIM"),
    "tutorials/decoder": ("GPT", "Llama", "language model"),
    "tutorials/wrong_step": ("wrong gradients",),
    "tutorials/third_party": ("Hugging Face", "transformers", "third-party model"),
    "training": ("learning rate", "learning rate schedule", "dropout", "gradient accumulation", "minibatches"),
    "checkpoints": ("checkpoint", "restore", "reshard checkpoint"),
    "tutorials/vision": ("ViT", "image"),
    "experts": ("MoE", "mixture of experts"),
    "tutorials/lora": ("LoRA",),
    "gallery/index": ("gallery", "examples", "PPO", "cart-pole", "graph network", "GNN", "Mamba", "state space model"),
    "tensor_parallel": ("tensor parallel", "Megatron"),
    "context_parallel": ("long context", "ring attention", "sequence parallel"),
}


class Names(NamedTuple):
    """Group of public names: a heading of api.md."""

    title: str
    module: str  # defines the names
    what: str  # purpose
    rows: list[tuple[str, str]]  # (name, purpose)

    @property
    def page(self):
        return f"names_{slug(self.title)}"


@cache
def groups_of_names():
    """Returns the groups of api.md. A heading of the second level is a module, of the third level a group of names."""
    _, *parts = HEADING.split((DOCS / "api.md").read_text())
    found, module = [], ""
    for level, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        module = module if level else title.strip("`")
        if rows := ROW.findall(body):
            what = " ".join(body.split("\n| name")[0].split())
            found.append(Names(title.strip("`"), module, what, rows))
    return found


@cache
def public_names():
    """Returns (module, name, purpose) of each row of api.md."""
    return [(group.module, *row) for group in groups_of_names() for row in group.rows]


def slug(title):
    return re.sub(r"\W+", "_", title.lower()).strip("_")


def write_pages(app):
    """Writes the implied pages (see the module docstring); unchanged pages are not rewritten."""
    reference = {name: _reference(face, name, what) for face, name, what in public_names()}
    groups = {group.page: _group_of_names(group) for group in groups_of_names()}
    groups |= {slug(caption): _group_of_pages(caption, entries) for caption, entries in groups_of_pages()}
    groups |= write_gallery.pages()
    for folder, wanted in ((DOCS / "reference", reference), (DOCS / "contents", groups)):
        folder.mkdir(exist_ok=True)
        present = {page.stem: page.read_text() for page in folder.glob("*.md")}
        for name in present.keys() - wanted.keys():
            (folder / f"{name}.md").unlink()
        for name, text in wanted.items():
            if present.get(name) != text:
                (folder / f"{name}.md").write_text(text)
        # Sphinx keeps pages of unchanged source files, with outdated links to names.
        if wanted is reference and present != wanted:
            shutil.rmtree(Path(app.outdir) / "_modules", ignore_errors=True)


def groups_of_pages():
    """Returns (caption, entries) of each group of index.md."""
    return [(caption, body.split("\n")[:-1]) for caption, body in GROUP.findall((DOCS / "index.md").read_text())]


def _group_of_pages(caption, entries):
    """Returns a table of pages and questions; the question of a page is the first paragraph below the title."""
    rows = []
    for entry in entries:
        page = re.sub(r".*<(.*)>", r"\1", entry)
        text = (DOCS.parent / AT_THE_TOP[page] if page in AT_THE_TOP else DOCS / f"{page}.md").read_text()
        asked = QUESTION.match(text)
        title = entry.split(" <")[0] if "<" in entry else re.search(r"^# (.*)", text, re.MULTILINE)[1]
        rows.append(f"| [{title}](../{page}.md) | {' '.join((asked[1] or asked[2]).split()) if asked else ''} |")
    pages = "\n".join(re.sub(r"^(.*<)?", lambda start: f"{start[0]}../", entry, count=1) for entry in entries)
    table = "\n".join(["| page | question |", "| --- | --- |", *rows])
    return f"# {caption}\n\n{table}\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def _group_of_names(group):
    table = "\n".join(f"| [`{name}`](../reference/{name}.md) | {what} |" for name, what in group.rows)
    names = "\n".join(f"../reference/{name}" for name, _ in group.rows)
    what = re.sub(r"\]\((?!http)", "](../", group.what)
    table = re.sub(r"\]\((?!http|\.\./)", "](../", table)
    head = f"# {group.title}\n\n{what} Import from `{group.module}`.\n\n| name | description |\n| --- | --- |\n"
    return f"{head}{table}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def _reference(face, name, what):
    value = getattr(importlib.import_module(face), name)
    if not callable(value):
        body = f".. py:data:: {name}\n\n   {what}"
    else:
        body = f".. autoclass:: {name}\n   :members:" if isinstance(value, type) else f".. autofunction:: {name}"
    return f"# {name}\n\n```{{eval-rst}}\n.. currentmodule:: {face}\n\n{body}\n```\n"


def groups_of_index(text):
    """Returns the opening of the site's first page, with the groups of pages as contents."""
    entries = "\n".join(f"contents/{slug(caption)}" for caption, _ in groups_of_pages())
    return GROUP.sub("", text).rstrip() + f"\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def groups_of_api(text):
    """Returns the page of public names: its opening, the names by first letter, and the groups with their purposes."""
    groups = groups_of_names()
    listed = "\n\n".join(f"[{group.title}](contents/{group.page}.md)\n: {group.what}" for group in groups)
    pages = "\n".join(f"contents/{group.page}" for group in groups)
    names = letters((name, f"reference/{name}.html") for _, name, _ in public_names())
    head = text.split("\n## ")[0]
    return f"{head}\n{names}\n## Groups\n\n{listed}\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def letters(entries, more=""):
    """Returns folded HTML lists of links by first letter, from (text, address); signs and ``SMALL_WORDS`` are skipped.

    A letter with more than ``ONE_SCREEN`` links becomes several groups, named by first and last word.
    """
    groups = {}
    for text, address in entries:
        word = re.search(rf"^(?:[^a-zA-Z]|\b(?:{SMALL_WORDS})\b)*([a-zA-Z].*)", text) or re.search("([a-zA-Z].*)", text)
        link = f'<li><a href="{address}"><code>{html.escape(text)}</code></a></li>'
        groups.setdefault(word[1][0].upper(), []).append((word[1].lower(), link))
    folded = []
    for letter, found in sorted(groups.items()):
        parts = math.ceil(len(found) / ONE_SCREEN)
        for part in range(parts):
            first, end = (len(found) * i // parts for i in (part, part + 1))
            words, links = zip(*sorted(found)[first:end], strict=True)
            name = letter if parts == 1 else " to ".join(word.split()[0][:3] for word in (words[0], words[-1]))
            folded.append(f'<details name="letter"><summary>{name}</summary><ul>{"".join(links)}</ul></details>')
    return f'```{{raw}} html\n<div class="letters{more}">{"".join(folded)}</div>\n```\n'


def messages_by_letter(text):
    """Returns the page of errors with a list of messages by first letter below the opening, and folded sections."""
    found = []

    def marked(bullet):
        name = f"message-{len(found)}"
        heads = re.findall(r"\*\*`([^`]+)`\*\*", bullet[0].replace("\n  ", " ")) or [bullet[1] or bullet[2]]
        found.extend((head, f"#{name}") for head in heads)
        return f'* <a id="{name}"></a>{bullet[0].removeprefix("* ")}'

    text = re.sub(r"^\* (?:\*\*`([^`]+)`|`([^`]+)`)(?:.*\n)(?:  .*\n)*", marked, text, flags=re.MULTILINE)
    return text.replace("\n## ", f"\n{letters(found, ' folds')}\n## ", 1)


def gallery_with_pages(text):
    """Returns the gallery with links to the pages of its programs, in place of links to files."""
    pages = "\n".join(f"../contents/{page}" for page in write_gallery.pages())
    linked = re.sub(r"\]\((\w+)\.py\)", r"](../contents/gallery_\1.md)", text)
    return f"{linked}\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def with_keywords(page, text):
    """Returns the page with keywords as main entries of the index, below the title."""
    if page not in KEYWORDS:
        return text
    entries = ", ".join(f"! {word}" for word in KEYWORDS[page])
    return re.sub(r"^(# .*\n)", rf"\1\n```{{eval-rst}}\n.. index:: {entries}\n```\n", text, count=1, flags=re.MULTILINE)
