"""Diagnosis, for ``check_step``, of a loss that is not a mean over rows.

With the loss L of the full batch, L_1 .. L_n of its slices (a device's rows), gradients g, and equal draws everywhere:

  L = mean of L_i, g = mean of g_i      a mean over rows
  L = n x the mean                      a sum over rows; or the loss was divided by the global batch
  g = sum of c_i g_i, L = sum of c_i L_i, sum of c_i = 1      a mean of rows with weights
  g = sum of c_i g_i                    a function of a mean: a root, a logarithm
  L of the batch twice grows as a sum    in part a sum over rows (each row is repeated)
  L of the batch twice differs otherwise a comparison of rows with each other: negatives
  otherwise                              a statistic of the batch: a variance, a rank, a largest value
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.training.step_check import report
from xlstm_jax.distributed.training.step_check.comparison import LeafCheck, Multiple, flat
from xlstm_jax.distributed.training.step_check.draws import constant_like
from xlstm_jax.distributed.training.step_check.one_device import OneDevice, Reference
from xlstm_jax.formatting import format_axes

MOST_DRAWS = 256
FITS = 1e-4  # relative rest of a fit that cannot be chance: gradients have several times as many values as slices


def why_no_mean(
    one_device: OneDevice,
    rng: PyTree,
    mean: Reference,
    full_batch: Reference,
    same: list[LeafCheck],
    times: Multiple,
    sizes: dict[str, int],
    tolerance: float,
) -> Iterator[str]:
    """Yields sentences with the kind of a loss that is not a mean over rows (a sum, say), and a cure: one or two.

    Slices are the rows of each device in each minibatch.

    Args:
      one_device, rng: the loss, and the key with which ``mean`` and ``full_batch`` were computed.
      mean, full_batch: the loss and gradients averaged over slices, and of the full batch.
      same: the gradients of ``mean``, compared with the gradients of ``full_batch``.
      times: the loss of ``mean`` over the loss of ``full_batch``.
      sizes: the number of parts by each axis that splits the batch, and by minibatches.
      tolerance: the largest effect of rounding on the ratio of the two losses.
    """
    minibatches = one_device.num_minibatches
    if times.is_count and all(_is_multiple(leaf, times, sizes) for leaf in same):
        yield report.of_loss(times, one_device.loss.weighted)
        return
    axes = format_axes(one_device.axes)
    is_not = _is_not(mean, full_batch, same)
    if minibatches > 1 and _is_same(one_device.slices(rng, minibatches=1), full_batch, tolerance):
        yield (
            f"{is_not}. On whole devices it is right, and num_minibatches={minibatches} changes it: a statistic of the "
            "batch is then one of each minibatch. Take num_minibatches=1 (and nn.remat for memory)."
        )
        return
    splits_examples = one_device.axes != one_device.layout.row_axes
    if one_device.loss.weighted and not splits_examples:
        yield (
            f"{is_not}. With weighted=True loss_fn returns (sum, weight), each a plain sum over its rows: the sum here "
            "depends on the other rows. Reduce statistics of the batch over all devices first: "
            f"pmean(statistic, {axes})."
        )
        return
    kind = "statistic" if one_device.loss.weighted else _kind(one_device, rng, mean, full_batch)
    if splits_examples and kind in ("statistic", "reduced"):
        within = format_axes(tuple(axis for axis in one_device.axes if axis not in one_device.layout.row_axes))
        yield f"{is_not}. {_OF_TOKENS.format(within)}"
        return
    yield f"{is_not}. {_CURES[kind].format(axes)}"
    if minibatches > 1:
        yield f"num_minibatches={minibatches} changes such a loss, too: see it right with num_minibatches=1 first."


def _is_not(mean: Reference, full_batch: Reference, leaves: list[LeafCheck]) -> str:
    """Returns the first clause of a finding on a loss that is no mean over rows, with both losses as numbers.

    As "the loss is no mean over rows: 1.5 as the mean of its slices, 3 of the batch". If the losses agree to six
    digits, the clause is about the gradients, with the leaf that differs most. ``leaves`` are the gradients of the
    slices compared with those of the batch.
    """
    of_slices, of_batch = f"{mean.loss:.6g}", f"{full_batch.loss:.6g}"
    if of_slices != of_batch:
        return f"the loss is no mean over rows: {of_slices} as the mean of its slices, {of_batch} of the batch"
    worst = max(leaves, key=lambda leaf: math.hypot(leaf.ratio - 1, leaf.error))
    off = math.hypot(worst.ratio - 1, worst.error)
    return (
        f"the gradients of the batch are not the mean of those of its slices (off by {off:.2g} of their norm, of "
        f"'{worst.path}'), although both losses are {of_batch}"
    )


_CURES = {
    "weights": "The step minimises another mean. Where examples have weights (masks), return (sum, weight) with "
    "weighted=True: return (losses * mask).sum(), mask.sum().",
    "function": "It is a function of a mean (a root, a logarithm, a ratio), and the mean of its values is another "
    "number. Reduce the mean over the devices first, by jax.lax: mean = pmean(mean, {0}); return the loss computed "
    'from it as the local value: pcast(loss, {0}, to="varying").',
    "part": "A part of it is a sum over rows. Return means over the rows that loss_fn is given, of all parts.",
    "negatives": "It compares rows with each other (negatives, pairs), and a device has its local rows. Gather all rows"
    " by jax.lax: keys = all_gather(keys, {0}, tiled=True); the label of row i here is lax.axis_index({0}) * rows + i.",
    "statistic": "It uses a statistic of the batch (a mean, a variance, a covariance, a rank), which a device computes "
    "from its local rows. Reduce the statistic over all devices: mean = pmean(x.mean(0), {0}) of jax.lax, "
    "nn.BatchNorm(axis_name={0}), and values = all_gather(values, {0}, tiled=True) for ranks.",
    "reduced": "It communicates over devices, and is another number than on one device. A standard deviation is the "
    "root of pmean(square, {0}), not the mean of roots; labels of gathered rows begin at lax.axis_index({0}) * rows.",
}


_OF_TOKENS = (
    "An example is split over {0}, and a device has a part of its tokens. A layer that reads other tokens must "
    "exchange them over {0} (context_attention, recurrence_over_axis), and positions must be global "
    "(context_positions). A mean over tokens with weights is (sum, weight), with weighted=True."
)


def multiple_over_draws(one_device: OneDevice, rng: PyTree, sizes: dict[str, int]) -> Multiple | None:
    """Returns the ratio of the slices' loss to the batch's loss, both averaged over draws; None without a clear ratio.

    Slices are the rows of each device in each minibatch. A clear ratio is 1, a number of devices or minibatches (see
    ``sizes``), or an inverse, and holds for the gradients, too. The keys in ``rng`` are replaced by constant keys:
    every draw is a fraction u of its range. The draw of a row may depend on its position (stratified times of a
    diffusion model). For a single u slices and batch then differ; averaged over as many evenly spaced u as the batch
    has rows (at most ``MOST_DRAWS``), they agree.
    """
    rows = max((len(leaf) for leaf in jax.tree.leaves(one_device.batch) if np.ndim(leaf)), default=1)
    count = min(rows, MOST_DRAWS)
    # Evenly spaced, so that the mean over draws has no sampling noise.
    keys = [constant_like(rng, (i + 0.5) / count) for i in range(count)]
    pairs = [(one_device.slices(key), one_device.on_full_batch(key)) for key in keys]
    pairs = [(mean, full_batch) for mean, full_batch in pairs if mean.is_finite and full_batch.is_finite]
    if not pairs:
        return None
    (mean, full_batch), (of_mean, of_whole) = (
        [np.mean([read(pair[i]) for pair in pairs], 0) for i in (0, 1)]
        for read in (lambda reference: reference.loss, _vector)
    )
    tolerance = max(FITS, 8 * one_device.eps(rng))
    ratio = float(mean / full_batch) if full_batch else np.inf
    times = Multiple.of(ratio, sizes, tolerance)
    left = np.linalg.norm(of_mean - ratio * of_whole) if full_batch else np.inf
    return times if times.kind != "other" and left <= tolerance * np.linalg.norm(of_mean) else None


def is_sum_over_positions(one_device: OneDevice, key: PyTree) -> bool:
    """Returns whether the loss is a sum or a mean over rows, where the draws of a row may depend on its position.

    Computes loss and gradients of both halves of the batch, then exchanges every other row between the halves, at the
    same position, and computes both halves again. True if the sums over the halves stay equal up to rounding. ``key``
    is the key of each computation.
    """

    def half(rest: int, other: int) -> Reference:
        def rows(x: Any) -> Any:
            if not np.ndim(x):
                return x
            # Exchange every other row with the row at the same position in the other half.
            parts = jnp.reshape(x[: len(x) // 2 * 2], (2, len(x) // 2, *x.shape[1:]))
            even = jnp.arange(len(x) // 2).reshape(-1, *[1] * (x.ndim - 1)) % 2 == 0
            return jnp.where(even, parts[rest], parts[other])

        return one_device.on_full_batch(key, batch=jax.tree.map(rows, one_device.batch))

    before, after = ([half(i, j) for i, j in pairs] for pairs in (((0, 0), (1, 1)), ((0, 1), (1, 0))))
    losses = [sum(reference.loss for reference in pair) for pair in (before, after)]
    vectors = [_vector(pair[0]) + _vector(pair[1]) for pair in (before, after)]
    tolerance = FITS if one_device.eps(key) < FITS else 8 * one_device.eps(key)
    left = float(np.linalg.norm(vectors[0] - vectors[1]))
    size = sum(float(np.linalg.norm(_vector(reference))) for reference in before)
    return left <= tolerance * size and abs(losses[0] - losses[1]) <= tolerance * sum(abs(f.loss) for f in before)


def _kind(one_device: OneDevice, rng: PyTree, mean: Reference, full_batch: Reference) -> str:
    """Returns the kind of a loss that is not a mean over rows, a key of ``_CURES``.

    "reduced": the loss has collectives over the batch. "part": a part of the loss is a sum over rows. "negatives": rows
    are compared with each other. "weights": a mean with weights. "function": a function of a mean. "statistic":
    anything else. ``mean`` is loss and gradients averaged over each device's rows, ``full_batch`` those of the full
    batch, both with the key ``rng``.
    """
    # Slices of a communicating loss have no separate values: devices compute them together.
    if one_device.needs_all_devices(rng):
        return "reduced"
    parts = [one_device.on_full_batch(rng, batch=part) for part in one_device.all_slices()]
    values = np.array([part.loss for part in parts])
    gradients = np.stack([_vector(part) for part in parts], 1)
    expected = _vector(full_batch)
    # Duplicating each row keeps a mean; a sum doubles, and pairs of rows change in another way.
    twice = one_device.on_full_batch(
        rng, batch=jax.tree.map(lambda x: jnp.concatenate([x, x]) if np.ndim(x) else x, one_device.batch)
    )
    scale = np.abs(values).max() + abs(full_batch.loss)
    if abs((twice.loss - full_batch.loss) * (1 - 1 / len(parts)) - (full_batch.loss - mean.loss)) <= FITS * abs(
        full_batch.loss - mean.loss
    ):
        return "part"
    if abs(twice.loss - full_batch.loss) > FITS * scale:
        return "negatives"
    # If the batch gradient is a combination of the slice gradients, the loss is a function of slice means.
    fit, *_ = np.linalg.lstsq(gradients, expected, rcond=None)
    left = np.linalg.norm(gradients @ fit - expected)
    # With few parameters any vector could be a combination by chance.
    if len(expected) > 2 * len(parts) and left <= FITS * np.linalg.norm(expected):
        is_mean = abs(fit.sum() - 1) <= FITS and abs(fit @ values - full_batch.loss) <= FITS * scale
        return "weights" if is_mean else "function"
    return "statistic"


def _vector(reference: Reference) -> np.ndarray:
    return np.concatenate(list(flat(reference.grads).values()))


def _is_multiple(leaf: LeafCheck, times: Multiple, sizes: dict[str, int]) -> bool:
    if leaf.is_only_rounding:
        return True
    return leaf.error <= leaf.tolerance and Multiple.of(leaf.ratio, sizes, leaf.tolerance).times == times.times


def _is_same(a: Reference, b: Reference, tolerance: float) -> bool:
    left, right = _vector(a), _vector(b)
    close = np.linalg.norm(left - right) <= max(FITS, 4 * tolerance) * np.linalg.norm(right)
    return bool(close and abs(a.loss - b.loss) <= max(FITS, 4 * tolerance) * abs(b.loss))
