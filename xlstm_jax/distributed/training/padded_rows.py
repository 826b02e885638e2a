"""Analysis of a step for padded rows: finds values computed from the rows without their weights.

``shard_batch(..., pad=...)`` appends copies of rows, and returns weights, 0 for the copies. Whether a step uses
the weights is read off its equations, once per shape of a padded batch:

  loss function    the loss and its weight, each auxiliary number, each updated collection
  evaluation       the observations of each metric

A sum over the rows of every device without weights, on which the loss depends, counts as a batch statistic.

A loss that depends on gathered rows compares rows across devices (contrastive losses, a top-k of the batch). The loss
is reported as a comparison, unless the loss also depends on weights from all devices, as for a mask of gathered rows.

A loss without a returned weight must reduce the weights over devices: devices hold different numbers of real rows, and
the mean of their means is not the mean.

A maximum or minimum over the rows is ignored: copies do not change it. So are the scales of fp8 products, which follow
from largest magnitudes.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire.running_loss import OVERWRITTEN
from xlstm_jax.distributed.device_mesh.batches import padded_rows_of
from xlstm_jax.distributed.metrics.cells import Cell
from xlstm_jax.distributed.metrics.pure_metric import PureMetric
from xlstm_jax.distributed.metrics.sums_and_means import Compose, Max, Min
from xlstm_jax.distributed.training.gradients import Loss, LossFunction
from xlstm_jax.distributed.training.varying import Axes, propagate_labels
from xlstm_jax.equations import COLLECTIVES, named_axes
from xlstm_jax.explicit_axes import on_auto_axes

ROWS, WEIGHTS, GLOBAL = Axes({"(rows that pad)"}), Axes({"(their weights)"}), Axes({"(reduced weights)"})
STATISTICS = Axes({"(sums of rows without weights)"})
GATHERED = Axes({"(rows of all devices without weights)"})
MARK = "xlstm_jax: "  # prefix of the names of marked values
LOSS, LOCAL_MEAN, WEIGHT, STATISTIC = "loss", "mean of local means", "weight of the loss", "statistic"
COMPARISON = "comparison"
AUX, COLLECTION, OBSERVED = "aux", "collection", "metric"
EXTREMA = {"reduce_max", "reduce_min", "reduce_or", "reduce_and"}


# ------------------------------------------------------------------------------------------------- marks in equations


@dataclass(frozen=True)
class MarkedLoss(LossFunction):
    """Loss function that gives its results names in the jaxpr, for ``counting_padding``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """Calls the loss function; returns its ``Loss``, whose arrays have names in the jaxpr for ``counting_padding``.

        Named are the loss, its weight, the leaves of the auxiliary output, and the leaves of updated collections. The
        values are unchanged.
        """
        result = super().__call__(*args, **kwargs)
        collections = result.collections
        if isinstance(collections, Mapping):
            collections = {
                name: tree if name == OVERWRITTEN else with_names(tree, COLLECTION, name)
                for name, tree in collections.items()
            }
        if result.weight is not None:
            with_names(jnp.asarray(result.weight), WEIGHT)  # names an array: result.weight may be a Python number
        return Loss(with_names(result.total, LOSS), result.weight, with_names(result.aux, AUX), collections)


def with_names(tree: PyTree, kind: str, name: str = "") -> PyTree:
    """Returns the tree with a ``checkpoint_name`` on each array, "xlstm_jax: KIND:PATH".

    PATH is the path of the leaf, below ``name`` if ``name`` is given. Leaves that are no ``jax.Array`` are unchanged.
    """

    def with_name(path: str, x: Any) -> Any:
        its = "/".join(part for part in (name, path) if part not in ("", "."))
        return checkpoint_name(x, f"{MARK}{kind}:{its}") if isinstance(x, jax.Array) else x

    # A cell consists of several arrays with a single name.
    leaves, treedef = trees.flatten_with_path(tree, Cell)
    return jax.tree.unflatten(treedef, [jax.tree.map(partial(with_name, path), leaf) for path, leaf in leaves])


# ------------------------------------------------------------------------------------------------------ read once


def counting_padding(
    step: Callable[..., Any],
    metric: PureMetric | None,
    row_axes: tuple[str, ...],
    batch: PyTree,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, list[str]]:
    """Traces a step; returns the names of results that count padded rows like real rows, as lists by kind of result.

    A result is ``{"collection": ["batch_stats/mean"]}``; kinds without such results are left out.

    Args:
      step: a step that names its results by ``with_names``.
      metric: the metric updated with the observations of the step, if any.
      row_axes: the axes over which rows are split.
      batch: the batch among the arguments.
      args, kwargs: the arguments of the step.
    """
    kinds: dict[int, Axes] = {}
    for leaf in jax.tree.leaves(batch):
        if padded_rows_of(leaf):
            kinds[id(leaf)] = ROWS
        # Any array without padding may be computed from the weights.
        elif getattr(leaf, "ndim", 0):
            kinds[id(leaf)] = WEIGHTS
    of_inputs = [kinds.get(id(leaf), Axes()) for leaf in jax.tree.leaves((args, kwargs))]
    reached: dict[str, Axes] = defaultdict(Axes)

    def look(eqn: Any, inputs: list[Axes]) -> list[Axes] | None:
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(MARK):
            name = eqn.params["name"].removeprefix(MARK)
            reached[name] = reached[name].union(*inputs)
        labels, kind = Axes().union(*inputs), COLLECTIVES.get(eqn.primitive.name)
        if kind in ("all-reduce", "all-gather") and WEIGHTS <= labels:
            return [labels | GLOBAL] * len(eqn.outvars)
        # A sum over the rows of every device, as in BatchNorm. A sum over other axes adds parts of a row.
        is_sum = kind == "all-reduce" and not eqn.primitive.name.startswith(("pmax", "pmin"))
        over_rows = bool(set(named_axes(eqn)) & set(row_axes)) if kind else False
        if is_sum and ROWS <= labels and over_rows:
            return [labels | STATISTICS] * len(eqn.outvars)
        if kind in ("all-gather", "collective-permute") and ROWS <= labels and over_rows:
            # Integers are requests between devices: row indices of a split table, numbers of tokens.
            return [labels | (GATHERED if _is_float(out) else Axes()) for out in eqn.outvars]
        if eqn.primitive.name in EXTREMA and all(out.aval.ndim == 0 for out in eqn.outvars):
            return [Axes()] * len(eqn.outvars)
        return None

    propagate_labels(jax.jit(on_auto_axes(step)).trace(*args, **kwargs).jaxpr, of_inputs, look)
    counts: dict[str, dict[str, Axes]] = defaultdict(lambda: defaultdict(Axes))
    for name, labels in reached.items():
        kind, _, path = name.partition(":")
        if kind == AUX and metric is not None:
            kind = OBSERVED
        if kind == OBSERVED:
            # Values and weights are arguments of the same metric.
            path = path.partition("/")[0] if isinstance(metric, Compose) else ""
            if isinstance(metric.metrics.get(path) if isinstance(metric, Compose) else metric, Max | Min):
                continue
        counts[kind][path] = counts[kind][path] | labels
    counting = {kind: _without_weights(kind, of_kind) for kind, of_kind in counts.items()}
    # The cure of an unweighted loss includes its weight.
    if counting.get(LOSS):
        counting.pop(WEIGHT, None)
    # Devices hold different numbers of real rows: local weights alone do not make a term of the global mean.
    if WEIGHT not in counts and _several_parts(batch):
        counting[LOCAL_MEAN] = [
            path for path, labels in counts[LOSS].items() if labels & WEIGHTS and not labels & GLOBAL
        ]
    # Statistics stored in collections are reported as collections.
    if not counting.get(COLLECTION):
        counting[STATISTIC] = [path for path, labels in counts[LOSS].items() if labels & STATISTICS]
    counting[COMPARISON] = [
        path for path, labels in counts[LOSS].items() if labels & GATHERED and not labels & (GLOBAL | STATISTICS)
    ]
    return {kind: names for kind, names in counting.items() if names}


def _several_parts(batch: PyTree) -> bool:
    """Returns whether this process's devices hold different rows of the batch, by the shards of its first padded leaf.

    The batch must have a padded leaf.
    """
    padded = next(leaf for leaf in jax.tree.leaves(batch) if padded_rows_of(leaf))
    return len({str(shard.index[0]) for shard in padded.addressable_shards}) > 1


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _without_weights(kind: str, reached: Mapping[str, Axes]) -> list[str]:
    # The number of rows depends on no value: used as a weight, it counts padded rows.
    from_rows = Axes() if kind == WEIGHT else ROWS
    return [path for path, labels in reached.items() if from_rows <= labels and not labels & WEIGHTS]
