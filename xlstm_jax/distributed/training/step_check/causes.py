"""What differs, its likely cause and its cure, in sentences: once for all leaves that have the same fault.

whole leaves, 8 x          summed over the 8 devices: nobody divided what JAX sums under check_vma=True
whole leaves, 1/8 x        divided twice
all leaves, loss, 1/8 x    the loss is a sum over examples, or was divided by the global batch
no multiple                each device kept its own, or shards of different leaves were averaged
none at all                the loss does not depend on the leaf
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from xlstm_jax.distributed.training.step_check.comparison import LeafCheck, Multiple
from xlstm_jax.wording import listed


def of_leaves(
    leaves: Sequence[LeafCheck],
    what: str,
    sizes: dict[str, int],
    of_loss: Multiple,
) -> Iterator[str]:
    """What is wrong with gradients.

    Args:
      leaves: all leaves, compared.
      what: what is compared of them.
      sizes: of the axes that have more than one device.
      of_loss: what is wrong with the loss, of which gradients are the same multiple.
    """
    faults: dict[str, list[LeafCheck]] = defaultdict(list)
    for leaf in leaves:
        if leaf.copies_differ or not leaf.is_equal:
            faults[_cause(leaf, sizes, of_loss)].append(leaf)
    for cause, some in faults.items():
        yield f"{what} of {_counted(some)} ({listed(leaf.path for leaf in some)}) are {cause}"


def _counted(leaves: Sequence[object]) -> str:
    return f"{len(leaves)} leaves" if len(leaves) > 1 else "1 leaf"


def _cause(leaf: LeafCheck, sizes: dict[str, int], of_loss: Multiple) -> str:
    multiple = Multiple.of(leaf.ratio, sizes, leaf.tolerance)
    if leaf.copies_differ:
        return (
            "not the same on all devices that should hold the same: averaged over too few axes, or not at all. Call "
            "sync_gradients over all axes of the batch, or use value_and_grad."
        )
    if not leaf.error <= leaf.tolerance:
        return (
            "no multiple of the right ones: the step saw another batch or another mean, or averaged leaves that are "
            "split over devices with each other (by pmean). Use value_and_grad, or sync_gradients."
        )
    times = f"{multiple.times} the right ones: "
    if multiple == of_loss:
        return times + "as the loss is."
    if multiple.kind == "summed":
        return (
            f"{times}summed over {multiple.axes}. JAX sums the gradient of what is whole on all devices "
            "(check_vma=True). Call sync_gradients once over all axes of the batch, or use value_and_grad."
        )
    if multiple.kind == "divided":
        return (
            f"{times}divided once more over {multiple.axes}. Call sync_gradients once, not on what value_and_grad or "
            "another sync_gradients returned; and return the loss of this device, without pmean."
        )
    return times + "which is no number of devices. Does the step scale its loss, or clip gradients itself?"


def of_none(paths: Sequence[str], all_leaves: int) -> Iterator[str]:
    """What to say of trainable leaves that get no gradient, whatever their values."""
    if paths and len(paths) == all_leaves:
        yield (
            "all gradients are 0, whatever the parameters are: the loss does not depend on its argument params. Does "
            "it close over other parameters (state.params, say), or over a model with its own? Compute it by "
            "apply_fn({'params': params}, ...). Or a stop_gradient, an argmax, or weights that are all 0 cut it off."
        )
    elif paths:
        yield (
            f"{_counted(paths)} ({listed(paths)}) get no gradient, whatever the parameters are: not used by this loss, "
            "behind a stop_gradient (or an argmax, or a rounding), or read from other parameters than params. If it is "
            "meant, freeze them: create_train_state(..., trainable=lambda path: ...)."
        )


NOT_FINITE_SLICES = (
    "the loss is not finite on slices of the batch, and is of the whole batch. A mean by weight divides by 0 where no "
    "row of a device has any: with weighted=True, return (losses * mask).sum(), mask.sum()."
)


def of_unknown(paths: Sequence[str], why: str, count: int) -> str:
    """What to say of a step whose means over keys are not known well enough, and what would tell."""
    return (
        f"{why}, and means over {count} keys are too uncertain for {listed(paths)}. What would tell: a loss and a step "
        "without random numbers (dropout off), a step that draws from its argument rng alone, or a larger batch."
    )


def of_loss(times: Multiple, weighted: bool) -> str:
    """What to say of a loss that is a number of devices, or 1 over it, times that of one device."""
    causes = _WEIGHTED_CAUSES if weighted else _LOSS_CAUSES
    return f"the loss is {times.times} that of one device: {causes[times.kind].format(times.axes)}"


_LOSS_CAUSES = {
    "summed": "it is summed over {0} (by psum?). Return this device's own mean.",
    "divided": "it is a sum over examples, or was divided by the global batch. Return the mean over the batch that "
    "loss_fn is given, or (sum, weight) with weighted=True.",
    "other": "the step reports another loss than loss_fn's mean over all devices. Report pmean(loss, axes) over "
    "all axes of the batch, or (sums of losses) / (sums of weights) where examples have weights.",
}
_WEIGHTED_CAUSES = {
    **_LOSS_CAUSES,
    "summed": "with weighted=True loss_fn returns (sum, weight), and this sum is a mean already (or was reduced over "
    "{0}). Return the sum over the rows that loss_fn is given.",
    "divided": "with weighted=True loss_fn returns (sum, weight), and this weight is no sum over rows, or the sum was "
    "divided. Return the sum of losses and the sum of weights, of the rows that loss_fn is given.",
}
