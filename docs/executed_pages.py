"""Runs the pages before Sphinx reads them, the longest first, in as many processes as the build has.

Sphinx reads chunks of pages in parallel, and would run each page when it reads the page: a chunk with long pages at the
end leaves the other processors idle. Here each process takes the next page when it is free. Outputs go to the cache in
which MyST-NB looks for a page's outputs. A page that fails is not cached, so Sphinx runs the page again and reports the
failure.
"""

import multiprocessing
import traceback
from contextlib import suppress
from tempfile import TemporaryDirectory

from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.read import read_myst_markdown_notebook

# The longest pages: 10 to 20 seconds each. Others follow by the length of their code.
LONGEST = (
    "tutorials/machines",
    "tensor_parallel",
    "tutorials/diffusion",
    "tutorials/third_party",
    "tutorials/generation",
    "tutorials/lora",
    "collections",
    "tutorials/moe",
    "coming_from/predecessor_tp",
    "training",
    "tutorials/decoder",
    "check_step",
    "context_parallel",
    "tutorials/wrong_step",
    "tutorials/whole_loop",
    "tutorials/plain_script",
    "sharding",
    "tutorials/vision",
)
CELL = "```{code-cell}"


def run(app, pages, prepare, meanwhile):
    """Runs pages that the cache lacks.

    Args:
        app: Sphinx's application.
        pages: Text of each page by name, as MyST-NB reads it.
        prepare: Called with the name of a page before the page runs, in the process that runs the page.
        meanwhile: Called in the process of the build while pages run.
    """
    rank = {name: place for place, name in enumerate(LONGEST)}
    waiting = sorted(
        pages,
        key=lambda name: (rank.get(name, len(rank)), -_length_of_code(pages[name])),
    )
    fork = multiprocessing.get_context("fork")
    taken = fork.Value("i", 0)
    processes = [
        fork.Process(target=_work, args=(app, waiting, pages, taken, prepare))
        for _ in range(app.parallel)
    ]
    for process in processes:
        process.start()
    meanwhile()
    for process in processes:
        process.join()


def _length_of_code(text):
    return sum(len(part.partition("\n```")[0]) for part in text.split(CELL)[1:])


def _work(app, waiting, pages, taken, prepare):
    while True:
        with taken.get_lock():
            place = taken.value
            taken.value += 1
        if place >= len(waiting):
            return
        name = waiting[place]
        prepare(name)
        try:
            _run_page(app, app.env.doc2path(name), pages[name])
        except Exception:  # Sphinx runs the page again, and reports what fails
            traceback.print_exc()


def _run_page(app, path, text):
    notebook = read_myst_markdown_notebook(text, app.env.myst_config, path=path)
    cache = get_cache(app.config.nb_execution_cache_path)
    with suppress(KeyError):
        cache.match_cache_notebook(notebook)
        return
    with TemporaryDirectory() as folder:
        done = single_nb_execution(
            notebook,
            cwd=folder,
            timeout=app.config.nb_execution_timeout,
            allow_errors=False,
        )
    if done.err is None:
        bundle = CacheBundleIn(
            notebook, str(path), data={"execution_seconds": done.time}
        )
        cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
