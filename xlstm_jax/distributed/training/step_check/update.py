"""Check of a step's update: compares it with the state's optimizer on one device.

With the parameters p and the optimizer's state s before the step, and the gradients g that the step passes to its
optimizer (``recording``):

  p and s          the optimizer receives the parameters and state of the training state, bit by bit
  u, s' = tx.update(g, s, p)      computed again on one device, equals the updates and the new state on the mesh
  p' = p + u       the parameters after the step, each to a unit in the last place
  frozen leaves    are unchanged by the step, bit by bit

A second step repeats the check from the state after the first, where moments and counts are no longer initial.

Whether g is correct is a separate question (``check``), so a wrong gradient and a wrong update are distinguished.
Neither is hidden by an optimizer that divides by the size of gradients: Adam's first update is g / |g|, and where g is
0 up to rounding its sign is random. From the same g both sides compute the same function, and differ by

  u, s'   64 eps of a leaf's norm, for sums in another order; and 8 times the effect of a relative change of g, s and p
          by eps (large for an orthogonalised matrix with small singular values), with eps of the narrowest dtype in tx
  p'      |p' - (p + u)| <= eps (|p| + |u|), entry by entry: u and the sum are each rounded by at most half a unit in
          the last place, and a compiler that fuses both rounds once less
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import true_value
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key, value_dtype
from xlstm_jax.distributed.optimizers.sharded_optimizer import trainable
from xlstm_jax.distributed.optimizers.transforms import call_update
from xlstm_jax.distributed.training.step_check.comparison import LeafCheck, compare_leaves, flat
from xlstm_jax.distributed.training.step_check.draws import traced
from xlstm_jax.distributed.training.step_check.observed import copies_differ
from xlstm_jax.distributed.training.step_check.one_device import COARSEST_EPS, MATMUL_EPS, perturbed
from xlstm_jax.distributed.training.step_check.recording import Record
from xlstm_jax.formatting import listed

HYPERPARAMS = "hyperparams"  # state of optax.inject_hyperparams, which programs may set
FITS = 64 * float(jnp.finfo(np.float32).eps)  # relative rest of an exact multiple, from sums in another order
CHANGED_ALL = (
    "the step changes all numbers in the optimizer's state, floats or integers, beside tx.update. Hand on its second "
    "result as it is, and set hyperparameters in opt_state.hyperparams alone."
)
Values = Mapping[str, np.ndarray]
Arrays = Mapping[str, Any]


class UpdateCheck(NamedTuple):
    """Result of the check of an update.

    Attributes:
      findings: errors, in sentences.
      unknown: reasons why a comparison was impossible, in sentences.
      compared: the parts that were compared; correct if there are no findings.
    """

    findings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()


def check_update(
    before: Any,
    after: Any,
    device: Mesh,
    run_second_step: Callable[[], Any] | None,
    value_fn: Callable[[PyTree], jax.Array] | None,
) -> UpdateCheck:
    """Compares the update of a step with one device, and then the update of a further step.

    The update is the optimizer's result from the gradients that the step computed, whether these are right or wrong.
    Returns an ``UpdateCheck``: findings (sentences on mistakes), reasons for missing comparisons, and the compared
    parts. The further step is not checked if the first has findings; its findings begin with "in a second step".

    Args:
      before, after: the state passed to the step, with a recording optimizer, and the state that the step returned.
      device: a mesh of one device with the axes of the step's mesh.
      run_second_step: runs the step from ``after``, and returns the state; None to check a single step.
      value_fn: the loss on one device, as a function of the parameters, for optimizers that evaluate it.
    """
    one_device = OneDeviceOptimizer(before.tx, device, value_fn)
    problems = _Update(before, after, one_device).check()
    if problems.findings or run_second_step is None:
        return problems
    # From the second step on moments are nonzero: an optimizer whose state restarts in each step shows here.
    later = _Update(after, run_second_step(), one_device).check()
    findings = [f"in a second step, {finding}" for finding in later.findings]
    return UpdateCheck(tuple(findings), problems.unknown or later.unknown, problems.compared)


class _Update:
    """Check of one update: parameters, optimizer state and record before and after a step, on the host."""

    def __init__(self, before: Any, after: Any, one_device: "OneDeviceOptimizer"):
        self.before, self.after, self.one_device = before, after, one_device
        self.record: Record = after.opt_state.record
        params = trainable(before.params)
        self.eps = {path: float(jnp.finfo(leaf.dtype).eps) for path, leaf in by_path(params).items()}
        self.old, self.new = values_of(params), values_of(trainable(after.params))
        self.updates = values_of(self.record.updates)
        self.params_seen_by_tx = values_of(self.record.params) if int(self.record.has_params) else self.old

    def check(self) -> UpdateCheck:
        """Compares what a step made of its gradients with what the optimizer makes of them; returns an ``UpdateCheck``.

        Compared are: parameters and state passed to the optimizer with those of the training state; new parameters with
        old parameters plus updates; frozen leaves with those before the step; ``state.step``, which may grow by 1;
        updates and optimizer state with those of a single device; and, if all this is right, copies of a shard with
        each other.

        If the step changed the record of the optimizer's call, the result has only this finding. If the gradients are
        not finite, nothing is compared, and ``unknown`` has the reason. The result is empty if the step did not call
        the optimizer exactly once: a different check reports this.
        """
        if not self.record.is_intact():
            return UpdateCheck((CHANGED_ALL,))
        if int(self.record.calls) - int(self.before.opt_state.record.calls) != 1:
            return UpdateCheck()  # reported by `check`
        if not all(np.all(np.isfinite(leaf)) for leaf in values_of(self.record.grads).values()):
            return UpdateCheck(unknown=("its gradients are not finite, and nothing can be said of its update",))
        findings = [*self.of_given(), *self.of_params(), *of_frozen(self.before, self.after), *self.of_count()]
        of_optimizer = self.of_optimizer()
        if not (findings or of_optimizer.findings):
            findings += self.of_copies()
        frozen = ("frozen leaves",) if frozen_leaves(self.before) else ()
        return UpdateCheck(
            (*findings, *of_optimizer.findings), of_optimizer.unknown, ("parameters", *frozen, *of_optimizer.compared)
        )

    # -------------------------------------------------------------------------------------------- the optimizer's input

    def of_given(self) -> Iterator[str]:
        """Yields findings if the step passed the optimizer parameters or a state that differ from the training state.

        At most two sentences: on parameters, and on the optimizer's state, with the paths of the leaves that differ.
        """
        nothing = {path: 0 * leaf for path, leaf in self.old.items()}
        other = [
            path
            for path in self.params_seen_by_tx
            if not self.is_sum(path, self.params_seen_by_tx[path], self.old[path], nothing[path])
        ]
        if other:
            yield (
                f"{_leaves(other)} have changed before the optimizer gets them. Pass it the parameters of the state; "
                "further changes of parameters belong into the optimizer, as a transform of its chain "
                "(optax.add_decayed_weights)."
            )
        before = dict(trees.leaves_with_path(self.before.opt_state.inner))
        changed = [
            path
            for path, leaf in self.record.opt_state.items()
            if path in before and not _is_set_by_hand(path) and not same_bits(leaf, before[path])
        ]
        if changed:
            yield (
                f"the optimizer's state ({listed(changed)}) is not that of the state when the optimizer gets it: "
                "moments and counts of the steps before are lost. Pass state.opt_state to tx.update, and call tx.init "
                "once, before the first step."
            )

    # ------------------------------------------------------------------------------------------- the updated parameters

    def of_params(self) -> Iterator[str]:
        """Yields findings if the parameters after the step are not the parameters before plus the optimizer's update.

        For each cause, such as a second update, a sentence with the paths of the leaves.
        """
        wrong = [
            path
            for path, new in self.new.items()
            if not self.is_sum(path, new, self.params_seen_by_tx[path], self.updates[path])
        ]
        causes: dict[str, list[str]] = defaultdict(list)
        # First try to find a common cause for every wrong leaf: a bias of zeros alone fits any factor.
        if wrong and (cause := self.multiple(wrong)):
            causes[cause] = wrong
        else:
            rest: list[str] = []
            for path in wrong:
                cause = self.multiple([path]) or self.misplaced(path)
                (causes[cause] if cause else rest).append(path)
            if rest:
                causes[self.unexplained_difference_text(rest)] = rest
        for cause, paths in causes.items():
            yield f"the step returns something else than the optimizer makes of {_leaves(paths)}: {cause}"

    def is_sum(self, path: str, new: np.ndarray, old: np.ndarray, update: np.ndarray) -> bool:
        """Returns whether each entry of ``new`` is ``old + update``, up to rounding.

        Rounding is to the dtype of the parameter at ``path``. False if ``new`` has another shape than ``old``. The
        arrays are in double precision.
        """
        allowed = self.eps[path] * (np.abs(old) + np.abs(update)) + jnp.finfo(np.float32).tiny
        return new.shape == old.shape and bool(np.all(np.abs(new - (old + update)) <= allowed))

    def multiple(self, paths: Sequence[str]) -> str:
        """Returns the cause of wrong parameters at ``paths`` as text, if a single factor explains every leaf; else "".

        The factor is of the update (0: the step returns the old parameters), of the old parameters, or of the updated
        parameters, as with weight decay by hand.
        """
        if any(self.new[path].shape != self.params_seen_by_tx[path].shape for path in paths):
            return ""
        each = (self.new, self.params_seen_by_tx, self.updates)
        new, old, update = (np.concatenate([values[path].ravel() for path in paths]) for values in each)
        fits = max(FITS, max(2 * self.eps[path] for path in paths))
        if np.array_equal(new, old):
            return (
                "they stay as they were. Return the parameters of optax.apply_updates(params, updates), or the state "
                "of apply_gradients."
            )
        # The change is known only to the rounding of the parameters.
        of_update = _multiple(new - old, update, fits * (1 + _size(old) / (_size(update) or 1)))
        if of_update is not None and f"{of_update:.3g}" != "1":
            return (
                f"they move by {of_update:.3g} x its update. Call apply_gradients, or optax.apply_updates, once, with "
                "the updates that tx.update returns; a factor belongs into the optimizer, as optax.scale."
            )
        for factor, cause in (
            (_multiple(new, old + update, fits), "multiplies them by {} after the update"),
            (_multiple(new - update, old, fits), "adds its update to {} x the parameters"),
        ):
            if factor is not None and f"{factor:.4g}" != "1":
                return (
                    f"the step {cause.format(f'{factor:.4g}')}. Decay belongs into the optimizer, as optax.chain(..., "
                    "optax.add_decayed_weights(...)), or optax.adamw."
                )
        return ""

    def misplaced(self, path: str) -> str:
        """Returns the cause of the wrong parameter at ``path`` as text; "" if neither of two causes fits.

        The causes: the parameter has a new shape, or has the new values of another leaf.
        """
        new, old = self.new[path], self.params_seen_by_tx[path]
        if new.shape != old.shape:
            return f"its shape is {new.shape}, and was {old.shape}. Return each leaf in its place."
        for other in self.new.keys() - {path}:
            if self.is_sum(path, new, self.params_seen_by_tx[other], self.updates[other]):
                return f"'{path}' gets the values of '{other}'. Return each leaf in its place."
        return ""

    def unexplained_difference_text(self, paths: Sequence[str]) -> str:
        left = [self.new[path] - self.params_seen_by_tx[path] - self.updates[path] for path in paths]
        size = sum(_size(self.updates[path]) ** 2 for path in paths) ** 0.5
        off = sum(_size(rest) ** 2 for rest in left) ** 0.5 / (size or 1)
        return (
            f"they are off by {off:.2g}{' x the norm of its updates' if size else ''}. Further changes of "
            "parameters belong into the optimizer, as a transform of its chain "
            "(optax.add_decayed_weights, optax.add_noise, optax.keep_params_nonnegative)."
        )

    def of_count(self) -> Iterator[str]:
        """Yields a finding if ``state.step`` after the step is neither the same as before nor greater by 1.

        Only for a Flax ``TrainState`` or a subclass.
        """
        if not isinstance(self.before, TrainState):
            return
        before, after = int(self.before.step), int(self.after.step)
        # Leaving the count to the caller, while drawing from other keys, is correct.
        if after not in (before, before + 1):
            yield (
                f"state.step is {after} after the step, and was {before}: it counts itself {after - before} times. "
                "Call apply_gradients once, or return state.replace(step=state.step + 1, ...)."
            )

    def of_copies(self) -> Iterator[str]:
        """Yields findings about copies of a shard that differ between devices after the update.

        At most two sentences: on parameters, and on the optimizer state. Nothing if copies of the gradients differ
        already.
        """
        if any(copies_differ(leaf.value) for _, leaf in trees.sharded_leaves(self.record.grads)):
            return
        for noun, tree in (("parameters", self.after.params), ("optimizer's state", self.after.opt_state.inner)):
            differ = [path for path, leaf in trees.sharded_leaves(tree) if copies_differ(leaf.value)]
            if differ:
                yield (
                    f"the {noun} ({listed(differ)}) are not the same on all devices that should hold the same after "
                    "the update, although the gradients are: the update depends on the device. Call tx.update outside "
                    "of shard_map, and draw noise from a key that all devices share."
                )

    # ---------------------------------------------------------------------------------------------------- the optimizer

    def of_optimizer(self) -> UpdateCheck:
        """Compares the updates and the state that the optimizer returned in the step with those of a single device.

        Returns an ``UpdateCheck``. The single device runs the same optimizer on the recorded gradients, state and
        parameters. An optimizer that cannot run there gives a sentence in ``unknown`` instead of a finding. The state
        is compared only if the updates are right.
        """
        try:
            expected, perturbed, eps = self.on_one_device()
        except Exception as error:  # optimizers that need arguments which only the step has may raise anything
            message = " ".join(f"{type(error).__name__}: {error}".split())[:120]
            why = (
                f"the state's optimizer cannot be called on one device ({message}), so that its updates are not "
                "compared. Gradients are: check the step with optax.sgd in its place, and this optimizer alone."
            )
            return UpdateCheck(unknown=(why,))
        (updates, state), got = expected, by_path(bare(self.record.updates))
        findings = list(of_updates(got, by_path(updates), lambda: by_path(perturbed()[0]), eps))
        if not findings:  # the state of wrong updates is wrong, too
            before = {path: true_value(leaf) for path, leaf in self.record.opt_state.items()}
            got_state, wanted = by_path(bare(self.after.opt_state.inner)), by_path(bare(state))
            findings = list(of_state(got_state, wanted, before, lambda: by_path(bare(perturbed()[1])), eps))
        return UpdateCheck(tuple(findings), (), ("updates", "the optimizer's state"))

    def on_one_device(self) -> tuple[tuple[PyTree, PyTree], Callable[[], tuple[PyTree, PyTree]], float]:
        """Runs the state's optimizer on a single device, with the recorded gradients, state and parameters of the step.

        Returns:
          ((updates, new state), ``perturbed``, eps). ``perturbed()`` returns (updates, new state) for inputs multiplied
          by 1 + u eps, with random u in (-1, 1); eps is that of the narrowest dtype in the optimizer, at most that of
          bfloat16.
        """
        params = bare(self.record.params) if int(self.record.has_params) else trainable(self.before.params)
        # Structure of the state, values as recorded by the optimizer.
        opt_state = self.record.opt_state
        state = trees.map_leaves_with_path(
            lambda path, leaf: true_value(opt_state.get(path, leaf)), self.before.opt_state.inner
        )
        inputs = bare(self.record.grads), state, params, self.record.value
        return self.one_device.run(inputs, has_value=bool(int(self.record.has_value)))


class OneDeviceOptimizer:
    """An optimizer on a single device, traced and compiled once for all steps whose inputs have equal shapes.

    Args:
      tx: the optimizer, an ``optax.GradientTransformation``.
      mesh: a mesh of one device with the axes of the step's mesh, which optimizers with collectives need.
      value_fn: the loss on the device, as a function of the parameters, for optimizers that evaluate the loss; or None.
    """

    def __init__(self, tx: Any, mesh: Mesh, value_fn: Callable[[PyTree], jax.Array] | None):
        self.tx, self.mesh, self.value_fn = tx, mesh, value_fn
        self._jitted: dict[bool, Any] = {}

    def run(
        self, inputs: tuple[PyTree, PyTree, PyTree, jax.Array], has_value: bool
    ) -> tuple[tuple[PyTree, PyTree], Callable[[], tuple[PyTree, PyTree]], float]:
        """Runs one update of the optimizer on the single device; returns the result, and a bound for rounding.

        Args:
          inputs: (gradients, optimizer state, parameters, loss), without boxes.
          has_value: whether the step passes the loss to the optimizer. The optimizer then gets the extra arguments
            ``value`` and ``grad``, and with a ``value_fn`` also ``value_fn`` and ``grad_fn``.
        Returns:
          ((updates, new state), ``perturbed``, eps). ``perturbed()`` returns (updates, new state) for inputs multiplied
            by 1 + u eps, with random u in (-1, 1); eps is that of the narrowest dtype in the optimizer, at most that of
            bfloat16.
        """
        inputs = jax.device_put(inputs, NamedSharding(self.mesh, PartitionSpec()))
        if has_value not in self._jitted:
            self._jitted[has_value] = self._compiled_for(inputs, has_value)
        run = self._jitted[has_value]
        platform = self.mesh.devices.flat[0].platform
        eps = min(max(traced(run.trace(*inputs).jaxpr).eps, MATMUL_EPS.get(platform, 0.0)), COARSEST_EPS)
        return run(*inputs), cache(lambda: run(*perturbed(inputs, eps))), eps

    def _compiled_for(self, inputs: tuple[PyTree, PyTree, PyTree, jax.Array], has_value: bool) -> Any:
        """Returns the optimizer's update, jitted: (gradients, state, parameters, loss) -> (updates, new state).

        For an optimizer with collectives the function runs in a ``shard_map`` on the mesh of one device. ``inputs`` are
        example inputs for a trace. With ``has_value`` the loss is passed to the optimizer, as ``value``.
        """
        value_fn = self.value_fn

        def gradients(params: PyTree, index: jax.Array | int = 0) -> PyTree:
            del index
            return jax.grad(value_fn)(params) if value_fn else params

        def update(grads: PyTree, state: PyTree, params: PyTree, value: jax.Array) -> tuple[PyTree, PyTree]:
            # The extra arguments that a ready-made step passes to its optimizer.
            extra: dict[str, Any] = {"value": value, "grad": grads} if has_value else {}
            if has_value and value_fn is not None:
                extra |= {"value_fn": value_fn, "grad_fn": gradients}
            return call_update(self.tx, grads, state, params, **extra)

        jitted = jax.jit(update)
        try:
            jitted.trace(*inputs)
        except NameError:  # a collective: mesh axes are bound only within a shard_map
            specs: dict[str, Any] = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
            return jax.jit(jax.shard_map(update, mesh=self.mesh, check_vma=False, **specs))
        return jitted


# ------------------------------------------------------------------------------------------------ for any optimizer


def frozen_leaves(state: Any) -> dict[str, Any]:
    """Returns the parameters of a ``TrainState`` that take no gradient (frozen, integers, keys), as boxes by path.

    A box, a ``Sharded``, is an array with its sharding.
    """
    return {path: leaf for path, leaf in trees.sharded_leaves(state.params) if not leaf.is_differentiable}


def of_frozen(before: Any, after: Any) -> Iterator[str]:
    """Yields one finding if parameters without gradient (frozen, integers) differ in a bit between two states.

    ``before`` and ``after`` are the states passed to a step and returned by the step.
    """
    now = dict(trees.leaves_with_path(after.params))
    changed = [path for path, leaf in frozen_leaves(before).items() if not same_bits(now[path], leaf)]
    if changed:
        yield (
            f"{_leaves(changed)} are frozen, and the step changes them. Update what is trainable alone, as "
            "apply_gradients does; or train them: create_train_state(..., trainable=lambda path: ...)."
        )


def of_updates(actual: Arrays, expected: Arrays, perturbed: Callable[[], Arrays], eps: float) -> Iterator[str]:
    """Yields one finding if the updates ``actual`` of the step differ from ``expected``, those of a single device.

    Both are arrays by path. ``perturbed()`` returns the updates of a single device for slightly perturbed inputs, as a
    bound for rounding. ``eps`` is the least eps for leaves wider than 32 bits, when float32's eps is not used.
    """
    wrong = [leaf for leaf in compare_each_leaf(actual, expected, perturbed, eps) if not leaf.is_equal]
    if wrong:
        yield (
            f"updates of {_leaves([leaf.path for leaf in wrong])} are not those that the optimizer makes of the same "
            f"gradients on one device, but {_times(wrong)}. Call tx.update outside of shard_map, as apply_gradients "
            "does: an optimizer that needs entire leaves (clipping, Adafactor, Muon) is wrong on shards."
        )


def of_state(
    actual: Arrays, expected: Arrays, before: Arrays, again: Callable[[], Arrays], eps: float
) -> Iterator[str]:
    """Yields at most one finding: how the optimizer state ``actual`` after a step differs from ``expected``.

    Leaves of ``inject_hyperparams`` are not compared. Floats may differ by rounding; integers and keys must be equal.

    Args:
      actual, expected: leaves by path, without boxes: of the step, and of the optimizer on a single device.
      before: the state passed to the step, to recognise a state that stays unchanged.
      again: returns ``expected`` computed from slightly perturbed inputs, as a bound for rounding.
      eps: the least eps for leaves wider than 32 bits; other leaves are compared with eps of float32.
    """
    if actual.keys() != expected.keys():
        other = sorted(actual.keys() ^ expected.keys())
        yield (
            f"the optimizer's state after the step has other leaves ({listed(other)}) than tx.update returns. Return "
            "its second result as opt_state."
        )
        return
    paths = [path for path in expected if not _is_set_by_hand(path)]
    numbers = [
        path for path in paths if is_inexact(expected[path]) and np.shape(actual[path]) == np.shape(expected[path])
    ]
    leaves = compare_each_leaf(
        {path: actual[path] for path in numbers}, {path: expected[path] for path in numbers}, again, eps
    )
    wrong = {leaf.path: f"{leaf.ratio:.3g} x" for leaf in leaves if not leaf.is_equal}
    for path in paths:
        if path not in numbers and not same_bits(actual[path], expected[path]):
            is_number = np.shape(actual[path]) == () and not is_prng_key(actual[path])
            wrong[path] = (
                f"{np.asarray(actual[path])} in place of {np.asarray(expected[path])}" if is_number else "other"
            )
    if not wrong:
        return
    if all(same_bits(actual[path], before[path]) for path in wrong if path in before):
        yield (
            f"the optimizer's state ({listed(list(wrong))}) stays as it was, and parameters do not: moments and counts "
            "of this step are lost. Return the opt_state of tx.update: state.replace(params=..., opt_state=...)."
        )
        return
    each = [f"'{path}' is {problem}" for path, problem in wrong.items()]
    yield (
        f"the optimizer's state after the step is not what tx.update returns on one device: {'; '.join(each[:3])}"
        f"{' ...' if len(each) > 3 else ''}. Return its second result as it is; an average of the weights is kept by "
        "with_ema(tx, decay)."
    )


def of_collections(
    got: Arrays, right: Arrays, before: Arrays, again: Callable[[], Arrays], eps: float
) -> Iterator[str]:
    """Yields at most one finding: that collections after a step differ from ``right``, those of a single device.

    Compares the floats that both have, by path; ``right`` is computed from the full batch.

    Args:
      got, right: leaves by path, without boxes: of the step, and of a single device.
      before: the collections passed to the step, to recognise collections that stay unchanged.
      again: returns ``right`` computed from slightly perturbed inputs, as a bound for rounding.
      eps: eps of float32, or of float64 if every parameter is float64.
    """
    paths = [path for path in right if path in got and is_inexact(right[path])]
    ours, wanted = (flat({path: tree[path] for path in paths}) for tree in (got, right))
    checks = compare_leaves(ours, wanted, {}, {}, lambda: flat({path: again()[path] for path in paths}), eps)
    wrong = [leaf for leaf in checks if not leaf.is_equal]
    if wrong and all(same_bits(got[leaf.path], before[leaf.path]) for leaf in wrong):
        yield (
            f"the collections ({listed(leaf.path for leaf in wrong)}) stay as they were. Return those that the loss "
            "returns: state.replace(collections=...)."
        )
    elif wrong:
        yield (
            f"the collections ({listed(leaf.path for leaf in wrong)}) after the step are not those of one device, but "
            f"{_times(wrong)}. Return those that the loss returns as they are, averaged over the devices once."
        )


def compare_each_leaf(actual: Arrays, expected: Arrays, again: Callable[[], Arrays], eps: float) -> list[LeafCheck]:
    """Returns a ``LeafCheck`` for each leaf of ``expected``, in the same order, with a tolerance from that leaf alone.

    For results of the same function of the same inputs, such as an optimizer's updates; gradients need a wider
    tolerance.

    Args:
      actual, expected: arrays by path, of the step and of a single device.
      again: returns ``expected`` computed from slightly perturbed inputs; called only for leaves that differ by more
        than the rounding of sums in another order.
      eps: the least eps for leaves wider than 32 bits; other leaves are compared with eps of float32.
    """
    checks = []
    for path, leaf in expected.items():
        dtype = value_dtype(leaf)
        narrow = float(jnp.finfo(dtype).eps) if jnp.finfo(dtype).bits < 32 else 0.0
        # Denormal numbers may be flushed to 0 in one program and not in the other.
        floor = float(jnp.finfo(dtype).tiny) * np.sqrt(np.size(leaf)) + narrow * float(
            np.linalg.norm(np.asarray(leaf, np.complex128).ravel())
        )
        checks += compare_leaves(
            flat({path: actual[path]}),
            flat({path: leaf}),
            {},
            {path: floor},
            partial(_one_leaf, again, path),
            float(jnp.finfo(np.float32).eps) if jnp.finfo(dtype).bits <= 32 else max(eps, float(jnp.finfo(dtype).eps)),
        )
    return checks


def _one_leaf(again: Callable[[], Arrays], path: str) -> dict[str, np.ndarray]:
    return flat({path: again()[path]})


def bare(tree: PyTree) -> PyTree:
    """Returns the tree with each box (an array with its sharding) replaced by the array, without padding."""
    return trees.map_leaves(true_value, tree)


def by_path(tree: PyTree) -> dict[str, Any]:
    return dict(trees.leaves_with_path(tree))


def values_of(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns the values of the leaves by path, without boxes and padding, as NumPy arrays of float64 or complex128."""

    def value(leaf: Any) -> np.ndarray:
        array = np.asarray(true_value(leaf))
        return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)

    return {path: value(leaf) for path, leaf in trees.leaves_with_path(tree)}


def is_inexact(leaf: Any) -> bool:
    return not is_prng_key(leaf) and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def same_bits(a: Any, b: Any) -> bool:
    """Returns whether two leaves, arrays or boxes (arrays with a sharding), store equal shapes and equal bytes.

    Padding is compared, too; dtypes and shardings are not.
    """

    def stored(leaf: Any) -> list[np.ndarray]:
        arrays = jax.tree.leaves(trees.stored_values(leaf))
        return [np.asarray(jax.random.key_data(x) if is_prng_key(x) else x) for x in arrays]

    first, second = stored(a), stored(b)
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


def _is_set_by_hand(path: str) -> bool:
    return HYPERPARAMS in path.split("/")


def _multiple(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> float | None:
    """Returns the real factor f with ``actual`` = f ``expected``; None if no factor fits, or if ``expected`` is 0.

    ``tolerance`` is the allowed norm of the rest, relative to the norm of ``expected``.
    """
    size = _size(expected)
    if not size:
        return None
    factor = float(np.real(np.vdot(expected, actual))) / size**2
    return factor if _size(actual - factor * expected) <= tolerance * size else None


def _size(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.ravel()))


def _leaves(paths: Sequence[str]) -> str:
    count = f"{len(paths)} leaves" if len(paths) > 1 else "1 leaf"
    return f"{count} ({listed(paths)})"


def _times(wrong: Sequence[LeafCheck]) -> str:
    """Returns the end of a sentence on wrong leaves: "2 x these", or "off by up to 0.3 of their norm".

    The first form is for leaves with a common ratio; the second has the largest relative error.
    """
    ratios = [leaf.ratio for leaf in wrong]
    if max(leaf.error for leaf in wrong) <= FITS and max(ratios) - min(ratios) <= FITS:
        return f"{ratios[0]:.3g} x these"
    off = max(float(np.hypot(leaf.ratio - 1, leaf.error)) for leaf in wrong)
    return f"off by up to {off:.2g} of their norm"
