"""Sphinx extension that gives pages the compiler reports in ``docs/reports``, so that no page waits for a compiler.

Pages forecast steps on TPUs and GPUs. XLA takes 10 s to a minute to compile such a step, and its report depends only
on the step, the options and the versions of the packages. A page whose step has no report compiles the step, as a
reader's program does. ``KEEP_REPORTS=1 make docs`` stores new reports in ``docs/reports``, and removes reports that no
page has read; do this after a change of a page, of the programs that the library compiles, or of JAX.
"""

import os
import shutil
from pathlib import Path

from xlstm_jax.forecast.compiling.report_cache import FOLDER_VARIABLE, SUFFIX

KEPT = Path(__file__).parent / "reports"
CACHE = Path(__file__).parent / "_build" / "reports"  # of this build


def fill(app):
    """Copies the kept reports into the cache of this build, as files that only this user may write."""
    del app
    shutil.rmtree(CACHE, ignore_errors=True)
    CACHE.mkdir(parents=True, mode=0o700)
    for report in KEPT.glob(f"*{SUFFIX}"):
        copied = CACHE / report.name
        shutil.copyfile(report, copied)
        copied.chmod(0o600)
        os.utime(copied, (0, 0))  # a read sets the time


def keep(app, exception):
    """Replaces the kept reports by the reports that pages have read or written with ``KEEP_REPORTS=1``.

    Without it, prints how many reports were compiled: kept reports become stale without any other sign.
    """
    del app
    if exception is not None:
        return
    used = [report for report in CACHE.glob(f"*{SUFFIX}") if report.stat().st_mtime > 0]
    if os.environ.get("KEEP_REPORTS") == "1":
        shutil.rmtree(KEPT)
        KEPT.mkdir()
        for report in used:
            shutil.copyfile(report, KEPT / report.name)
    elif compiled := [report for report in used if not (KEPT / report.name).exists()]:
        print(
            f"{len(compiled)} compiler reports of pages are not in docs/reports, and were compiled."
            " KEEP_REPORTS=1 make docs keeps them."
        )


def setup(app):
    """Called by Sphinx."""
    os.environ[FOLDER_VARIABLE] = str(CACHE)
    app.connect("builder-inited", fill)
    app.connect("build-finished", keep)
    return {"parallel_read_safe": True}
