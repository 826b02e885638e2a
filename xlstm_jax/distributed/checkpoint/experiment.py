"""Which optimizer and which experiment a saved step belongs to.

Adam's moments have the paths and shapes of NAdam's, RAdam's or Yogi's, so a restore could mix them up. The record of a
step therefore names the optimizer, at the first leaf of each ``opt_state``: ``chain(scale_by_adam, scale) of optax
0.2.6``. Two experiments are told apart by their trees: one directory holds steps of one tree.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.record import OPTIMIZER, Record, fits
from xlstm_jax.distributed.data_parallel.trees import flatten_with_path
from xlstm_jax.distributed.optimizers.inside import name_of
from xlstm_jax.wording import listed

USERS_LINE = 3  # the caller of restore, for warnings.warn


@runtime_checkable
class HasOptimizer(Protocol):
    """A ``TrainState``, ours or Flax's."""

    tx: Any
    opt_state: Any


def optimizers_of(state: PyTree) -> dict[str, str]:
    """The optimizer of each ``opt_state`` in a state, by the beginning of the paths of its leaves."""
    found, _ = flatten_with_path(state, HasOptimizer)
    nodes = {path: node for path, node in found if isinstance(node, HasOptimizer) and hasattr(node.tx, "update")}
    begin = {path: "opt_state/" if path == "." else f"{path}/opt_state/" for path in nodes}
    return {begin[path]: f"{name_of(node.tx, flags=True)} of optax {optax.__version__}" for path, node in nodes.items()}


def with_optimizers(entries: Record, state: PyTree) -> Record:
    """The record of a state with the names of its optimizers."""
    named = {_first(entries, begin): name for begin, name in optimizers_of(state).items()}
    return {path: entry | {OPTIMIZER: named[path]} if path in named else entry for path, entry in entries.items()}


def _first(entries: Mapping[str, Any], begin: str) -> str | None:
    return min((path for path in entries if path.startswith(begin)), default=None)


def warn_if_other_optimizer(where: str, entries: Record, state: PyTree) -> None:
    """Warns where the saved ``opt_state`` is of another optimizer than the target's, by their names."""
    for begin, wanted in optimizers_of(state).items():
        saved = entries.get(_first(entries, begin) or "", {}).get(OPTIMIZER, wanted)
        if not _mean_the_same(saved, wanted):
            warnings.warn(
                f"{where}: '{_first(entries, begin)}' was saved with the optimizer {saved}, and is read into the state "
                f"of {wanted}, whose moments may mean something else. To begin the optimizer anew, read the parameters "
                "alone, by restore_params.",
                stacklevel=USERS_LINE,
            )


def _mean_the_same(one: str, other: str) -> bool:
    """Whether two names are of one optimizer, whatever the version; ``muon`` goes to and from that of optax."""
    names = [name.rpartition(" of optax ")[0] for name in (one, other)]
    return names[0] == names[1] or all("muon" in name for name in names)


def check_same_tree(entries: Record, newest: Record, where: str) -> None:
    """Raises a ``ValueError`` where a step to be saved has another tree than the newest in its directory."""
    paths = sorted(entries.keys() | newest.keys())
    unlike = [path for path in paths if not (path in entries and path in newest and fits(newest[path], entries[path]))]
    if unlike:
        of_both = [of.get(unlike[0]) for of in (newest, entries)]
        saved, new = ("nothing" if entry is None else f"{entry['dtype']}{entry['shape']}" for entry in of_both)
        raise ValueError(
            f"{where} is of another state than the one to save: at {listed(unlike)}, first {saved} there and {new} "
            "here. Steps of two experiments in one directory push each other out, and restore takes either. Take "
            "another directory; to go on from that step, restore it first, or its parameters by restore_params."
        )
