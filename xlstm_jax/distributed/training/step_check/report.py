"""Result of ``check_step``: the verdict, and sentences that name a cause and a cure.

replicated leaves, 8 x       gradients are summed over 8 devices, as JAX does under check_vma=True, and not divided
replicated leaves, 1/8 x     gradients are divided twice
every leaf and loss, 1/8 x   the loss is a sum over examples, or was divided by the global batch
no multiple                  gradients are not averaged over devices, or different shards of a leaf were averaged
no gradient                  the loss does not depend on the leaf

Leaves with the same cause share a sentence.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from xlstm_jax.distributed.training.step_check.comparison import LeafCheck, Multiple
from xlstm_jax.distributed.training.step_check.one_device import Reference
from xlstm_jax.formatting import TIMES, Bar, format_axes, format_mesh, joined, listed, notebook_html

_LINES = textwrap.TextWrapper(80, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
_TITLES = textwrap.TextWrapper(80, subsequent_indent="  ", break_long_words=False)
RIGHT, WRONG, CANNOT_TELL = "right", "wrong", "cannot tell"


@dataclass(frozen=True, repr=False)
class StepCheck:
    """Result of ``check_step``; ``print`` shows it as text.

    >>> StepCheck("wrong", ("the loss is 1/8 x that of one device",), "gradients", "exactly", {"fsdp": 8}, (), 0.125)
    <StepCheck wrong: gradients of 0 leaves on fsdp=8, findings: 1>

    Attributes:
      verdict: "right", "wrong" or "cannot tell"; ``ok`` is True for "right".
      findings: sentences that name errors; for "cannot tell" the reason, and the change that makes a verdict possible.
      compared: the compared values: "gradients"; or "first moments" or "updates", if the step uses a custom optimizer
        instead of the state's.
      method: how one device computed the reference, and with which random numbers.
      mesh: axes and sizes.
      leaves: a ``LeafCheck`` for each trainable parameter.
      loss_ratio: the loss of the step over the loss of one device; None if the step returns no metric "loss".
      update: the parts of the update that were compared: "parameters" after the step, "frozen leaves", "updates" and
        "the optimizer's state". Their reference: the state's optimizer on one device, called with the same gradients.
    """

    verdict: str
    findings: tuple[str, ...]
    compared: str
    method: str
    mesh: dict[str, int]
    leaves: tuple[LeafCheck, ...]
    loss_ratio: float | None
    update: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.verdict == RIGHT

    @property
    def noise(self) -> float:
        """Returns the largest relative difference explained by rounding; 0 without leaves.

        The value is the largest ``tolerance`` of the leaves. If means over many keys were compared, the difference is
        that explained by the random draws.
        """
        return max((leaf.tolerance for leaf in self.leaves), default=0.0)

    def __repr__(self) -> str:
        return (
            f"<StepCheck {self.verdict}: {self.compared} of {len(self.leaves)} leaves on {format_mesh(self.mesh)}, "
            f"findings: {len(self.findings)}>"
        )

    def _repr_html_(self) -> str:
        """Returns HTML for notebooks: a bar per leaf, wrong leaves first; then the text.

        A bar shows the ratio of a leaf's gradient to the correct gradient.
        """
        bars = sorted(map(_bar, self.leaves), key=lambda bar: (not bar.warns, -bar.size))
        return notebook_html(Text(str(self)), f"Of each leaf the {self.compared} over those of one device", bars)

    def __str__(self) -> str:
        verdict = RIGHT if self.ok else self.verdict.upper()
        title = f"{self.compared} of {len(self.leaves)} leaves on the mesh {format_mesh(self.mesh)}, against one device"
        lines = [_TITLES.fill(f"{title}: {verdict}"), *map(_LINES.fill, self.findings)]
        if self.ok and self.leaves:
            worst = max(self.leaves, key=_distance)
            lines.append(
                _LINES.fill(
                    f"{self.method}; the largest difference is {_distance(worst):.1g} of '{worst.path}', where "
                    f"rounding explains {worst.tolerance:.1g}"
                )
            )
            lines.append(_LINES.fill(_compared(self.compared, self.update)))
        return "\n".join(lines)


def _compared(subject: str, update: Sequence[str]) -> str:
    """Returns a sentence for the text of a right verdict: the compared and the uncompared parts of the step.

    Args:
      subject: the compared values: "gradients"; or "first moments" or "updates", for a step with a custom optimizer.
      update: the compared parts of the update, the field ``update`` of ``StepCheck``.
    """
    if subject != "gradients":
        state = " and state" if update else ""
        return (
            f"the step has an optimizer of its own, whose {subject}{state} were compared with those of the state's "
            "optimizer on one device; metrics but the loss, and the values of collections, were not"
        )
    collections = "" if "collections" in update else ", and the values of collections,"
    return (
        f"{joined(update)} after the step are those of one device with the same gradients, in a second step, too; "
        f"metrics but the loss{collections} were not compared"
    )


def _bar(leaf: LeafCheck) -> Bar:
    text = "rounding alone" if leaf.is_only_rounding else f"{leaf.ratio:.4g} {TIMES}"
    # If the correct gradient is 0 the ratio is infinite; a bar needs a finite length.
    ratio = 1.0 if leaf.is_only_rounding else abs(leaf.ratio)
    return Bar(leaf.path, ratio if math.isfinite(ratio) else 0.0, text, leaf.copies_differ or not leaf.is_equal)


def _distance(leaf: LeafCheck) -> float:
    return math.hypot(leaf.ratio - 1, leaf.error)


def of_leaves(
    leaves: Sequence[LeafCheck],
    subject: str,
    sizes: dict[str, int],
    of_loss: Multiple,
    model_axes: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yields a sentence for each cause of wrong gradients, with the number of affected leaves and the first paths.

    Args:
      leaves: the comparison of every leaf; nothing is yielded for right leaves.
      subject: the name of the compared values, such as "gradients".
      sizes: the sizes of the axes with more than one device.
      of_loss: the loss of the step over the correct loss; gradients with the same ratio need no other cause.
      model_axes: the axes along which the model communicates, and over which the batch is not split.
    """
    faults: dict[str, list[LeafCheck]] = defaultdict(list)
    # A mistake of the model along an axis affects some leaves: those before its split layers. A missing average over
    # rows affects every leaf.
    all_alike = len({round(leaf.ratio, 3) for leaf in leaves if not leaf.is_only_rounding}) == 1
    if model_axes and not all_alike:
        sizes = {axis: size for axis, size in sizes.items() if axis in model_axes} | sizes
    for leaf in leaves:
        if leaf.copies_differ or not leaf.is_equal:
            faults[_cause(leaf, sizes, of_loss, model_axes)].append(leaf)
    for cause, some in faults.items():
        yield f"{subject} of {_counted(some)} ({listed(leaf.path for leaf in some)}) are {cause}"


def _counted(leaves: Sequence[object]) -> str:
    return f"{len(leaves)} leaves" if len(leaves) > 1 else "1 leaf"


def _cause(leaf: LeafCheck, sizes: dict[str, int], of_loss: Multiple, model_axes: tuple[str, ...]) -> str:
    """Returns the end of a sentence, after "gradients of ... are", with the likely cause of a wrong leaf and a cure.

    Equal causes give equal texts, by which the caller groups leaves.

    Args:
      leaf: the comparison of the leaf.
      sizes: the sizes of the axes with more than one device.
      of_loss: the loss of the step over the correct loss; for gradients with the same ratio the cause is the loss.
      model_axes: the axes along which the model communicates, and over which the batch is not split.
    """
    # The order matters: copies that differ have no single ratio, and a leaf with a rest is not a multiple.
    multiple = Multiple.of(leaf.ratio, sizes, leaf.tolerance)
    axes = multiple.axes
    of_model = set(multiple.axis_names) <= set(model_axes)
    if leaf.copies_differ:
        kind, axes = "copies differ", format_axes(leaf.differ_along or model_axes)
        of_model = bool(leaf.differ_along) and set(leaf.differ_along) <= set(model_axes)
    elif not leaf.error <= leaf.tolerance:
        # With a correct loss the rows are correct, so the gradient of the model's communication is wrong.
        kind, axes, of_model = "no multiple", format_axes(model_axes), of_loss.kind == "equal"
    else:
        kind = "as the loss" if multiple == of_loss else multiple.kind
        kind = "none" if leaf.ratio == 0 else kind
    causes = _MODEL_CAUSES if model_axes and of_model and kind in _MODEL_CAUSES else _LEAF_CAUSES
    return causes.get(kind, causes.get("other", "")).format(times=multiple.times, axes=axes)


# Causes for a correct loss with wrong gradients, where the model communicates along an axis.
_MODEL_CAUSES = {
    "copies differ": "not the same on all devices along {axes}, along which the model is split: the sum over devices "
    "is missing. Pass the input of split layers through enter_split, as ColumnDense does, and wrap modules with "
    "parameters in between by on_split_input.",
    "no multiple": "no multiple of the right ones: a part of them is counted on each device along {axes}, along which "
    "the model is split, or on one device alone. Use leave_split in place of a psum, and enter_split for the input of "
    "split layers, or RowDense and ColumnDense.",
    "summed": "{times} the right ones: counted once on each device along {axes}, along which the model is split. The "
    "gradient of a psum (or all_gather) by hand is summed over the devices once more (check_vma=False): use "
    "leave_split (join_tokens), or RowDense.",
    "divided": "{times} the right ones: each device along {axes}, along which the model is split, has its part, and "
    "the sum of the parts is missing, or is a mean. Pass the input of split layers through enter_split, as ColumnDense "
    "does, and sum by leave_split instead of pmean.",
}
_LEAF_CAUSES = {
    "copies differ": "not the same on all devices that should hold the same: averaged over too few axes, or not at "
    "all. Call sync_gradients over all axes of the batch, or use value_and_grad.",
    "no multiple": "no multiple of the right ones: the step saw another batch or another mean, or averaged leaves that "
    "are split over devices with each other (by pmean). Use value_and_grad, or sync_gradients.",
    "as the loss": "{times} the right ones: as the loss is.",
    "summed": "{times} the right ones: summed over {axes}. JAX sums the gradients of replicated parameters "
    "(check_vma=True). Call sync_gradients once over all axes of the batch, or use value_and_grad.",
    "divided": "{times} the right ones: divided once more over {axes}. Call sync_gradients once, not on what "
    "value_and_grad or another sync_gradients returned; and return the loss of this device, without pmean.",
    "none": "0 x the right ones: the step drops them, and these parameters are not trained. Pass the optimizer all "
    "gradients, and return its updates and its state.",
    "other": "{times} the right ones: which is no number of devices. Does the step scale its loss, or clip gradients "
    "itself?",
}


def zero_gradient_lines(paths: Sequence[str], all_leaves: int) -> Iterator[str]:
    """Yields one finding about the leaves ``paths``, whose gradient is 0 for any parameters; nothing without paths.

    ``all_leaves`` is the number of trainable leaves: if ``paths`` are as many, the finding is about the loss function.
    """
    if paths and len(paths) == all_leaves:
        yield (
            "all gradients are 0, whatever the parameters are: the loss does not depend on its argument params. "
            "Compute it by apply_fn({'params': params}, ...), not from parameters in a closure (state.params, say); or "
            "remove the stop_gradient, the argmax, or the weights that are all 0 in between."
        )
    elif paths:
        yield (
            f"{_counted(paths)} ({listed(paths)}) get no gradient, whatever the parameters are: not used by this loss, "
            "behind a stop_gradient (or an argmax, or a rounding), or read from other parameters than params. If this "
            "is meant, freeze them: create_train_state(..., trainable=lambda path: ...)."
        )


def not_finite(reference: Reference) -> str:
    """Returns the sentence that the reference, computed on a single device, has an infinite or NaN loss or gradient.

    Names the loss, or, if the loss is finite, the leaves with such gradients.
    """
    loss_is_finite = math.isfinite(reference.loss)
    subject = f"the gradients of {listed(reference.not_finite)}" if loss_is_finite else f"the loss ({reference.loss})"
    return f"{subject} are not finite on one device either: nothing can be compared. Look at the loss function first."


NOTHING_SHOWS = (
    "the step has an optimizer of its own, and no gradient changes its results: its updates are 0, and it has no "
    "moments. Call state.tx, by state.apply_gradients, or check it where the learning rate is not 0."
)

NOT_FINITE_SLICES = (
    "the loss is not finite on slices of the batch, and is of the whole batch. A weighted mean divides by 0 on a "
    "device whose rows have no weight: with weighted=True, return (losses * mask).sum(), mask.sum()."
)


def unknown_lines(paths: Sequence[str], why: str, count: int) -> str:
    """Returns the text for the verdict "cannot tell": the reason, the leaves, and changes that help.

    Args:
      paths: the leaves for which means over keys are too uncertain.
      why: the reason for comparing means over keys, as the beginning of a sentence.
      count: the number of keys.
    """
    return (
        f"{why}, and means over {count} keys are too uncertain for {listed(paths)}. For a verdict, pass a loss and a "
        "step without random numbers (dropout off), a step that draws from its argument rng alone, or a larger batch."
    )


def of_model(times: Multiple, model_axes: Sequence[str]) -> str:
    """Returns the finding (a sentence) that the split model computes another loss than the model on a single device.

    ``model_axes`` are the axes along which the model is split. ``times`` is the loss of the split model over the loss
    of the single device.
    """
    axes = format_axes(tuple(model_axes))
    return (
        f"the loss is {times.times} that of one device for the same rows: the model, which communicates along {axes}, "
        f"computes something else where it is split. Look for a missing sum or mean over {axes} (leave_split), a bias "
        "that each device adds before the sum, and a layer that needs all features."
    )


def of_loss(times: Multiple, weighted: bool) -> str:
    """Returns the finding (a sentence) that the step's loss is wrong, with a cause and a cure.

    ``times`` is the loss over the loss of a single device, other than 1. ``weighted``: ``loss_fn`` returns (sum,
    weight), for which the cures differ.
    """
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
