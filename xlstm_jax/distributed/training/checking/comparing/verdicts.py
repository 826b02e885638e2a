"""What of a step is compared with what, in which order, and the verdict.

a step of make_train_step   beside slices with the same draws; these beside the batch, with draws that are all the same
a step of one's own         beside the batch, with draws that are all the same; if its draws come from other keys, by
                            means over many keys, which may not tell
"""

import contextlib
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.training.checking.collections import copies_differ, drifting
from xlstm_jax.distributed.training.checking.comparing import causes
from xlstm_jax.distributed.training.checking.comparing.comparison import (
    ORDER_EPS,
    LeafCheck,
    Multiple,
    compare_leaves,
    flat,
    of_wire,
    same_number,
)
from xlstm_jax.distributed.training.checking.comparing.draws import CHOICES, constant_like, folded, traced
from xlstm_jax.distributed.training.checking.comparing.many_keys import ratios
from xlstm_jax.distributed.training.checking.comparing.objective import (
    is_sum_over_positions,
    multiple_over_draws,
    why_no_mean,
)
from xlstm_jax.distributed.training.checking.comparing.observed import SeenStep, keeping_gradients, observe
from xlstm_jax.distributed.training.checking.comparing.one_device import Found, OneDevice
from xlstm_jax.wording import format_mesh, listed

_LINES = textwrap.TextWrapper(80, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
_TITLES = textwrap.TextWrapper(80, subsequent_indent="  ", break_long_words=False)
RIGHT, WRONG, CANNOT_TELL = "right", "wrong", "cannot tell"
LOSS = "(loss)"
ROUGHLY = 0.3  # where draws differ a loss of slices is not that of the batch, but no number of devices from it


@dataclass(frozen=True)
class StepCheck:
    """What ``check_step`` found; ``str`` says it in words.

    ``verdict`` is "right", "wrong" or "cannot tell", and ``ok`` whether it is the first; ``findings`` are sentences:
    what is wrong, or why it cannot be told and what would tell. ``compared`` is what the leaves are the ratios of:
    "gradients"; of a step that keeps its optimizer to itself its "first moments" and "updates". ``how`` says with which
    draws. ``loss_ratio`` is None where the step returns no metric "loss".

    >>> StepCheck("wrong", ("the loss is 1/8 x that of one device",), "gradients", "exactly", {"fsdp": 8}, (), 0.125).ok
    False
    """

    verdict: str
    findings: tuple[str, ...]
    compared: str
    how: str
    mesh: dict[str, int]
    leaves: tuple[LeafCheck, ...]
    loss_ratio: float | None

    @property
    def ok(self) -> bool:
        return self.verdict == RIGHT

    @property
    def noise(self) -> float:
        """The largest relative difference that rounding explains, or noise where means over keys are compared."""
        return max((leaf.tolerance for leaf in self.leaves), default=0.0)

    def __str__(self) -> str:
        verdict = RIGHT if self.ok else self.verdict.upper()
        title = f"{self.compared} of {len(self.leaves)} leaves on the mesh {format_mesh(self.mesh)}, against one device"
        lines = [_TITLES.fill(f"{title}: {verdict}"), *map(_LINES.fill, self.findings)]
        if self.ok and self.leaves:
            worst = max(self.leaves, key=_distance)
            lines.append(
                _LINES.fill(
                    f"{self.how}; the largest difference is {_distance(worst):.1g} of '{worst.path}', where rounding "
                    f"explains {worst.tolerance:.1g}"
                )
            )
        return "\n".join(lines)


def _distance(leaf: LeafCheck) -> float:
    return math.hypot(leaf.ratio - 1, leaf.error)


class Comparison:
    """A step, what it is given, and its loss on one device."""

    def __init__(self, step: Callable[..., Any], state: Any, given: tuple[Any, ...], one: OneDevice):
        self.step, self.state, self.given, self.one, self.mesh = step, state, given, one, one.mesh
        self.sizes = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        leaves = dict(trees.leaves_with_path(state.params))
        self.axes = {path: tuple(a for a in leaf_of(leaf).axes if a in self.sizes) for path, leaf in leaves.items()}
        wide = all(leaves[path].dtype == np.float64 for path in one.paths if hasattr(leaves[path], "dtype"))
        self.eps = float(np.finfo(np.float64 if wide and one.paths else np.float32).eps)

    def of_ready_step(self) -> StepCheck:
        """Against slices with the same draws; and these, with draws that are the same everywhere, against the batch."""
        one, rng = self.one, self.given[1]
        key = jax.random.fold_in(rng, self.state.step)  # as the step folds it
        same_key, whole = self.with_same_draws(key)
        if one.asks_for_axes(key):
            return self.of_communicating_loss(same_key, whole)
        right = one.slices(key)
        seen = self.observed(rng, right)
        if finding := _not_finite(right):
            return self.checked([finding if _not_finite(whole) else causes.NOT_FINITE_SLICES], seen, "", [], None)
        draws = one.traced(key).draws
        mean = one.slices(same_key) if draws else right
        of_loss, of_slices, findings = self.objective(same_key, mean, whole, seen, key)
        again = partial(one.slices, key, shake=True)
        seen, leaves = self.beside(seen, right, again)
        findings += self.loss_differs(seen, right, again) + self.of_updates(seen)
        total = [_of_both(*both) for both in zip(leaves, of_slices, strict=True)]
        findings += self.of_leaves(total if of_loss.kind in ("summed", "divided") else leaves, seen, of_loss)
        findings += self.without_gradient(key, right)
        ratio = _ratio(seen.loss.value, right.loss) * _ratio(mean.loss, whole.loss) if seen.loss else None
        how = "each device's rows with its own draws, one after another" if draws else "each device's rows in turn"
        return self.checked(findings, seen, how, total, ratio)

    def of_communicating_loss(self, key: Any, whole: Found) -> StepCheck:
        """Against the batch, all with draws that are the same everywhere: there are no slices by themselves."""
        seen = self.observed(key, whole)
        if finding := _not_finite(whole):
            return self.checked([finding], seen, "", [], None)
        again = partial(self.one.whole, key, shake=True)
        seen, leaves = self.beside(seen, whole, again)
        findings = self.loss_differs(seen, whole, again) + self.of_updates(seen)
        if findings or not _are_right(leaves):
            of_loss, _, of_objective = self.objective(key, self.one.slices(key), whole, seen, key)
            findings = of_objective or findings
            if not of_objective or of_loss.kind in ("summed", "divided"):
                findings += self.of_leaves(leaves, seen, of_loss)
        findings += self.without_gradient(key, whole)
        ratio = _ratio(seen.loss.value, whole.loss) if seen.loss else None
        return self.checked(findings, seen, "the batch at once", leaves, ratio)

    def with_same_draws(self, key: Any) -> tuple[Any, Found]:
        """A key whose draws are the same everywhere, where there are draws, and the loss of the batch with it."""
        same_key, found = key, None
        for u in CHOICES:
            same_key = constant_like(key, u)
            found = self.one.whole(same_key)
            if not _not_finite(found) and any(np.any(leaf) for leaf in found.grads.values()):
                break
            if not self.one.traced(key).draws:
                break
        assert found is not None
        return same_key, found

    @property
    def minibatches(self) -> dict[str, int]:
        count = self.one.loss.num_minibatches
        return {"num_minibatches": count} if count > 1 else {}

    def of_own_step(self) -> StepCheck:
        """Against the whole batch, with draws that are the same everywhere; else by means over many keys."""
        one = self.one
        key, whole = self.with_same_draws(self.given[1])
        try:
            seen = self.observed(key, whole)
        except Exception:  # whatever a step does with its key that none of this kind can do
            return self.by_many_keys("it does not take another kind of key")
        if finding := _not_finite(whole):
            return self.checked([finding], seen, "", [], None)
        seen, leaves = self.beside(seen, whole, partial(one.whole, key, shake=True))
        findings = self.loss_differs(seen, whole, partial(one.whole, key, shake=True)) + self.of_updates(seen)
        ratio = _ratio(seen.loss.value, whole.loss) if seen.loss else None
        differs = bool(findings) or not _are_right(leaves)
        if differs and (why := self.why_other_draws(key)):
            return self.by_many_keys(why)
        how = (
            "the batch at once, with draws that are the same everywhere"
            if self.step_draws(key)
            else "the batch at once"
        )
        if differs and (of_objective := self.own_objective(key, seen, whole)):
            return self.checked(of_objective, seen, how, leaves, ratio)
        of_loss = Multiple.of(1.0 if ratio is None else ratio, self.sizes, max(self.eps * ORDER_EPS, _largest(leaves)))
        findings += self.of_leaves(leaves, seen, of_loss) + self.without_gradient(key, whole)
        return self.checked(findings, seen, how, leaves, ratio)

    # ------------------------------------------------------------------------------------------------------ compared

    def observed(self, rng: Any, truth: Found) -> SeenStep:
        batch, _, *rest = self.given
        return observe(self.step, self.state, (batch, rng, *rest), self.one.tree(truth.grads), self.mesh)

    def beside(self, seen: SeenStep, truth: Found, shaken: Callable[[], Found]) -> tuple[SeenStep, list[LeafCheck]]:
        """What the step made of each leaf beside what it should have; of what was seen, the last that is right."""

        def as_seen(found: Found) -> dict[str, np.ndarray]:
            return flat(seen.of_gradients(self.one.tree(found.grads)))

        narrow = {**of_wire(self.state.params, truth), **seen.rounding}
        leaves = compare_leaves(flat(seen.got), as_seen(truth), self.axes, narrow, lambda: as_seen(shaken()), self.eps)
        leaves = [leaf._replace(copies_differ=copies_differ(seen.got[leaf.path])) for leaf in leaves]
        if seen.then is not None and _are_right(leaves):
            return self.beside(seen.then, truth, shaken)
        return seen, leaves

    def of_leaves(self, leaves: list[LeafCheck], seen: SeenStep, of_loss: Multiple) -> list[str]:
        return list(causes.of_leaves(leaves, seen.what, self.sizes | self.minibatches, of_loss))

    def of_updates(self, seen: SeenStep) -> list[str]:
        if seen.updates == 1:
            return []
        return [f"the step calls its optimizer {seen.updates} times. Call tx.update, or apply_gradients, once."]

    def loss_differs(self, seen: SeenStep, truth: Found, shaken: Callable[[], Found]) -> list[str]:
        if seen.loss is None:
            return []
        eps = max(self.eps, seen.loss.eps / 8)
        same, tolerance = same_number(seen.loss.value, truth.loss, lambda: shaken().loss, eps)
        times = Multiple.of(_ratio(seen.loss.value, truth.loss), self.sizes, tolerance)
        return [] if same or times.kind == "equal" else [causes.of_loss(times, self.one.loss.weighted)]

    def objective(
        self, key: Any, mean: Found, whole: Found, seen: SeenStep, real_key: Any
    ) -> tuple[Multiple, list[LeafCheck], list[str]]:
        """Whether the loss is a mean over rows: how many times too large it is, its gradients, and what to say."""
        shaken = partial(self.one.whole, key, shake=True)
        narrow = of_wire(self.state.params, mean)
        leaves = compare_leaves(
            flat(mean.grads), flat(whole.grads), self.axes, narrow, lambda: flat(shaken().grads), self.eps
        )
        eps = max(self.eps, seen.loss.eps / 8 if seen.loss else 0)
        same, tolerance = same_number(mean.loss, whole.loss, lambda: shaken().loss, eps)
        if (same and _are_right(leaves)) or self.one.devices * self.one.loss.num_minibatches == 1:
            return Multiple("equal"), leaves, []
        tolerance, ratio = max(tolerance, ORDER_EPS * self.eps), _ratio(mean.loss, whole.loss)
        sizes = self.sizes | self.minibatches
        times = Multiple.of(ratio, sizes, tolerance)
        of_draws = self.one.traced(key)
        if times.kind not in ("summed", "divided") and of_draws.draws:
            if not of_draws.foreign:  # a row's draw may go by its position
                over = multiple_over_draws(self.one, key, sizes)
            else:  # draws that are none of the key's differ between slices and batch, whatever the loss
                over = Multiple.of(ratio, sizes, ROUGHLY) if is_sum_over_positions(self.one, real_key) else None
            if over is not None:
                said = [] if over.kind == "equal" else [causes.of_loss(over, self.one.loss.weighted)]
                return over, [leaf._replace(ratio=1.0, error=0.0) for leaf in leaves], said
        return times, leaves, list(why_no_mean(self.one, key, mean, whole, leaves, self.sizes, tolerance))

    def own_objective(self, key: Any, seen: SeenStep, whole: Found) -> list[str]:
        """What to say where a step of somebody's own is right but for its loss, which is no mean over rows."""
        if not self.one.loss.axes:
            return []
        mean = self.one.slices(key)
        if not _are_right(self.beside(seen, mean, partial(self.one.slices, key, shake=True))[1]):
            return []
        return self.objective(key, mean, whole, seen, self.given[1])[2]

    def without_gradient(self, key: Any, truth: Found) -> list[str]:
        """What to say of leaves that the loss is not computed of; and where all gradients are 0, whatever they are."""
        if not any(leaf.size and not np.any(leaf) for leaf in truth.grads.values()):
            return []
        trials = (self.one.whole(constant_like(key) if i == 1 else key, elsewhere=i) for i in (1, 2))
        if not any(np.any(leaf) for found in (truth, *trials) for leaf in found.grads.values()):
            return list(causes.of_none(list(truth.grads), len(truth.grads)))
        return list(causes.of_none(self.one.unconnected(key), len(truth.grads)))

    # ---------------------------------------------------------------------------------------- draws nobody can follow

    def step_draws(self, key: Any) -> bool:
        return self.one.traced(key).draws

    def why_other_draws(self, key: Any) -> str:
        """Why a step may have drawn from other keys than the one that it was given; "" where it has not."""
        if self.one.traced(key).foreign:
            return "loss_fn draws from another key than the one that it is given"
        batch, _, *rest = self.given
        for state in (keeping_gradients(self.state, self.mesh), self.state):  # as it was run, either way
            with contextlib.suppress(Exception):  # a step that does more than JAX can trace
                foreign = traced(jax.make_jaxpr(self.step)(state, batch, key, *rest)).foreign
                return "it draws from another key than the one that it is given" if foreign else ""
        return "it cannot be traced, so that nobody sees what it draws"

    def by_many_keys(self, why: str) -> StepCheck:
        """Means over keys; the counter of the state moves on with them, for steps that fold it into a key."""
        kept: dict[str, Any] = {}

        def sample(i: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
            rng = folded(self.given[1], i)
            right = self.one.whole(rng)
            moved = Comparison(self.step, self.state.replace(step=self.state.step + i), self.given, self.one)
            seen = kept["seen"] = moved.observed(rng, right)
            ours, truth = flat(seen.got), flat(seen.of_gradients(self.one.tree(right.grads)))
            if seen.loss is not None:
                ours[LOSS], truth[LOSS] = np.array([seen.loss.value]), np.array([right.loss])
            return ours, truth

        found, count = ratios(sample)
        seen = kept["seen"]
        leaves = [
            LeafCheck(path, self.axes.get(path, ()), of.value, of.rest, of.allowed, copies_differ(seen.got[path]))
            for path, of in found.items()
            if path != LOSS
        ]
        loss = found.get(LOSS)
        of_loss = Multiple.of(loss.value, self.sizes, loss.allowed) if loss else Multiple("equal")
        findings = [causes.of_loss(of_loss, self.one.loss.weighted)] if of_loss.kind != "equal" else []
        findings += self.of_leaves(leaves, seen, of_loss)
        how = f"means over {count} keys, since {why}"
        ratio = loss.value if loss else None
        unknown = [path for path, of in found.items() if not of.is_known]
        if unknown and not any(leaf.copies_differ for leaf in leaves):
            return self.checked([causes.of_unknown(unknown, why, count)], seen, how, leaves, ratio, CANNOT_TELL)
        return self.checked(findings, seen, how, leaves, ratio)

    def checked(
        self,
        findings: list[str],
        seen: SeenStep,
        how: str,
        leaves: list[LeafCheck],
        loss_ratio: float | None,
        verdict: str | None = None,
    ) -> StepCheck:
        findings = [*findings, *drifting(seen.collections)]
        verdict = verdict or (WRONG if findings else RIGHT)
        return StepCheck(verdict, tuple(findings), seen.what, how, dict(self.mesh.shape), tuple(leaves), loss_ratio)


def _ratio(got: float, right: float) -> float:
    return got / right if right else (1.0 if got == right else math.inf)


def _are_right(leaves: list[LeafCheck]) -> bool:
    return all(leaf.is_equal and not leaf.copies_differ for leaf in leaves)


def _largest(leaves: list[LeafCheck]) -> float:
    return max((leaf.tolerance for leaf in leaves), default=0.0)


def _of_both(step: LeafCheck, loss: LeafCheck) -> LeafCheck:
    """A leaf of the step beside its slices, and of the slices beside the batch: of the step beside the batch."""
    return step._replace(
        ratio=step.ratio * loss.ratio,
        error=math.hypot(step.error, loss.error),
        tolerance=step.tolerance + loss.tolerance,
    )


def _not_finite(found: Found) -> str:
    bad = [path for path, leaf in found.grads.items() if not np.all(np.isfinite(np.asarray(leaf, np.complex128)))]
    if math.isfinite(found.loss) and not bad:
        return ""
    what = f"the gradients of {listed(bad)}" if math.isfinite(found.loss) else f"the loss ({found.loss})"
    return f"{what} are not finite on one device either: nothing can be compared. Look at the loss function first."
