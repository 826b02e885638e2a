"""Steps of models whose layers are split over the mesh axis "tp" (``split_models``)."""

import functools
from typing import Any

from tests.step_corpus import losses
from tests.step_corpus.entries import Entry
from tests.step_corpus.own import own, synced
from tests.step_corpus.ready import ready


def entry(name: str, model: str, *, verdict: str, kind: str = "ready: split layers", **more: Any) -> Entry:
    fixed = {"model": model, "mesh": "split", "nnx": False}
    return Entry(name, kind, verdict, more.pop("make", ready), losses.mean, **(fixed | more))


right = functools.partial(entry, verdict="right")
wrong = functools.partial(entry, verdict="wrong")
WITH_TYPES, WITHOUT_TYPES = {"check_vma": (True,)}, {"check_vma": (False,)}
OF_MODEL = "computes something else where it is split"

ENTRIES = [
    right("two layers", "split", **WITHOUT_TYPES),
    right("a whole scale between, wrapped", "split, whole scale wrapped", **WITH_TYPES),
    right("two layers, own step", "split", kind="own: split layers", make=own(synced), **WITH_TYPES),
    wrong("input not entered", "split, not entered", names="along 'tp'", **WITHOUT_TYPES),
    wrong("psum by hand", "split, psum by hand", names="along 'tp'", **WITHOUT_TYPES),
    wrong("a whole scale between, not wrapped", "split, whole scale", names="along 'tp'", **WITHOUT_TYPES),
    wrong("a mean in place of the sum", "split, pmean", names=OF_MODEL, **WITH_TYPES),
    wrong("not summed", "split, not summed", names=OF_MODEL, **WITHOUT_TYPES),
    wrong("bias before the sum", "split, bias before the sum", names=OF_MODEL, **WITH_TYPES),
    wrong("summed twice", "split, psum twice", names=OF_MODEL, **WITHOUT_TYPES),
    wrong("normalised by a device's features", "split, normalised", names=OF_MODEL, **WITH_TYPES),
    wrong("the columns of one device", "split, one device", names=OF_MODEL, **WITH_TYPES),
    wrong(
        "psum by hand, own step",
        "split, psum by hand",
        kind="own: split layers",
        names="along 'tp'",
        make=own(synced),
        **WITHOUT_TYPES,
    ),
]
