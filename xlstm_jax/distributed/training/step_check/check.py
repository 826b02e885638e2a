"""``check_step``: runs a step on the mesh and on one device, and explains the differences.

  the step         equals, to rounding, each device's rows (a slice) computed in sequence with the same draws
  its loss         is a mean over rows: the loss of the full batch is the mean over its slices
  its parameters   each trainable parameter has a gradient

A step that averages wrongly still trains, only worse, and no type shows the mistake. But its gradients are then a
multiple of the correct gradients: the affected leaves and the factor identify the mistake (``report``).

make_train_step    compares the step with the slices, same draws; the slices with the full batch, constant draws
custom step        compares the step with the full batch, constant draws; or, if the step draws from different keys,
                   means over many keys, which may stay inconclusive

Constant draws come from ``draws.constant_key``: equal for every device, row and shape.
"""

import contextlib
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.averages import wrong_averages_pass
from xlstm_jax.distributed.data_parallel.trees import readable
from xlstm_jax.distributed.data_parallel.wire.running_loss import OVERWRITTEN
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout, auto_mesh, batch_layout, num_shards
from xlstm_jax.distributed.model_parallel.sequence_layout import CONTIGUOUS, SequenceLayout
from xlstm_jax.distributed.training.arguments import ExtraTrees, collections_of, takes_key, without_key
from xlstm_jax.distributed.training.batch_axes import StepOfState
from xlstm_jax.distributed.training.constant_arrays import with_constants
from xlstm_jax.distributed.training.gradients import LossFunction
from xlstm_jax.distributed.training.loss import LossOutput
from xlstm_jax.distributed.training.state import FlaxTrainState
from xlstm_jax.distributed.training.step import StepOptions
from xlstm_jax.distributed.training.step_check import report
from xlstm_jax.distributed.training.step_check.comparison import (
    ORDER_EPS,
    LeafCheck,
    Multiple,
    compare_leaves,
    flat,
    of_wire,
    ratios,
    same_number,
)
from xlstm_jax.distributed.training.step_check.copies import padded_row_findings
from xlstm_jax.distributed.training.step_check.draws import CHOICES, constant_like, folded, traced
from xlstm_jax.distributed.training.step_check.objective import is_sum_over_positions, multiple_over_draws, why_no_mean
from xlstm_jax.distributed.training.step_check.observed import (
    SeenStep,
    copies_differ,
    differ_along,
    drifting,
    observe,
)
from xlstm_jax.distributed.training.step_check.one_device import OneDevice, Reference
from xlstm_jax.distributed.training.step_check.recording import recorded_state
from xlstm_jax.distributed.training.step_check.report import CANNOT_TELL, RIGHT, WRONG, StepCheck
from xlstm_jax.distributed.training.step_check.update import (
    UpdateCheck,
    bare,
    by_path,
    check_update,
    of_collections,
    of_frozen,
    of_state,
    same_bits,
)
from xlstm_jax.explicit_axes import outside_set_mesh

LOSS = "(loss)"
ROUGHLY = 0.3  # different draws change the ratio of slices' loss to batch loss, but by far less than a factor of 2
BATCH_AT_ONCE = "the batch at once"


@partial(outside_set_mesh, inside="step")
def check_step(
    step: Callable[..., Any],
    state: FlaxTrainState,
    batch: PyTree,
    rng: jax.Array | None = None,
    *rest: Any,
    loss_fn: Callable[..., LossOutput] | None = None,
    weighted: bool = False,
    has_aux: bool = False,
    batch_spec: PyTree | None = None,
    extra_trees: ExtraTrees = None,
) -> StepCheck:
    """Runs a step on the mesh, and compares its gradients with a computation on a single device.

    Run the check once, with a small model and batch, for a custom step or after a change. The state is neither changed
    nor donated. During the check a device holds the full model and batch; every device must belong to this process.

    >>> loss_fn = lambda params, apply_fn, batch, rng: jnp.sum(apply_fn({"params": params}, batch) ** 2)  # not a mean
    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))
    >>> found = check_step(make_train_step(loss_fn, mesh, ("dp", "fsdp")), state, x, jax.random.key(1))
    >>> found.verdict, [(leaf.path, round(leaf.ratio, 3)) for leaf in found.leaves]
    ('wrong', [('bias', 0.125), ('kernel', 0.125)])

    Args:
      step: ``step(state, batch, rng, *rest) -> (state, metrics, ...)``, from ``make_train_step`` or a custom step.
      state: a ``TrainState`` on a mesh.
      batch: a batch with global leaves, as for the step.
      rng: a key, as for the step. For a step of ``make_train_step``, a single device repeats the draws of every device.
        A custom step receives a key whose draws are equal on every device, however the step folds the key; if the step
        draws from different keys, means over many keys are compared. None: step and loss draw nothing, and the step is
        called as ``step(state, batch)``.
      loss_fn: ``loss_fn(params, apply_fn, batch, rng)``, the objective of the step: the mean over the batch passed in.
        None for the loss of ``make_train_step``. Takes and returns collections if the state has any.
      weighted, has_aux: describe the result of ``loss_fn``, as for ``make_train_step``; unused without ``loss_fn``.
      batch_spec: the split of the batch in a custom step, if not by examples alone; see ``make_train_step``, whose
        steps provide the spec.
      extra_trees: further trees, passed to step and loss by name, as in ``make_train_step``.
    Returns:
      A ``StepCheck``. The verdict "cannot tell" is possible only for a custom step.
    Raises:
      ValueError: ``loss_fn`` is missing, or the parameters are not on a mesh, or partly in different processes.
    """
    # The step wraps a method of StepOptions; unwrap also finds it if jit or a decorator has wrapped the step again.
    if isinstance(unwrapped := inspect.unwrap(step), StepOfState):
        unwrapped = inspect.unwrap(unwrapped.of_state(state))
    options = getattr(unwrapped, "__self__", None)
    options = options if isinstance(options, StepOptions) else None
    if loss_fn is not None:
        loss = LossFunction(loss_fn, weighted, has_aux)
    elif options is not None:
        loss = options.loss
    else:
        raise ValueError(
            "check_step: this step is not of make_train_step. Pass loss_fn=, a loss_fn(params, apply_fn, batch, rng) "
            "that returns the mean loss over the batch that it is given."
        )
    mesh = _mesh_of(state.params)
    layout = options.layout if options else _likely_layout(state.params, batch, mesh, batch_spec)
    minibatches = options.accumulation.num_minibatches if options else 1
    fn = with_constants(loss.fn, state, rng is not None, returns_pair=True)
    loss = replace(loss, fn=fn)
    if not takes_key(loss.fn, rng, collections_of(state), extra_trees or {}):
        loss = replace(loss, fn=without_key(loss.fn))
    if rng is None:
        step, rng = _without_draws(step), jax.random.key(0)
    one_device = OneDevice(loss, layout, minibatches, state, batch, mesh, extra_trees or {})
    comparison = Comparison(
        partial(step, extra_trees=extra_trees) if extra_trees else step, state, (batch, rng, *rest), one_device
    )
    with wrong_averages_pass():  # the numbers show the mistake, and its factor
        return comparison.check_ready_step() if options else comparison.check_own_step()


def _without_draws(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function ``(state, batch, rng, *rest, **extra_trees)`` that calls ``step`` without the key ``rng``.

    The call is ``step(state, batch, **extra_trees)`` or, with further arguments, ``step(state, batch, None, *rest,
    **extra_trees)``.
    """

    def keyless(state: Any, batch: PyTree, rng: jax.Array, *rest: Any, **extra_trees: Any) -> Any:
        del rng
        return step(state, batch, *((None, *rest) if rest else ()), **extra_trees)

    return keyless


def _mesh_of(params: PyTree) -> Mesh:
    """Returns the mesh of the parameters, a ``Mesh`` of devices, with the type of each axis changed to ``Auto``.

    The mesh is that of the first leaf on a ``Mesh``, in tree order; later leaves are not read.

    Raises:
      ValueError: a leaf read on the way is on no mesh, or on devices of several processes; or no leaf is on a ``Mesh``.
    """
    for path, leaf in trees.sharded_leaves(params):
        sharding = getattr(leaf.value, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"check_step: '{path}' is on no mesh ({sharding}). Make the state with create_train_state."
            )
        if not sharding.is_fully_addressable:
            raise ValueError(
                f"check_step: '{path}' is on devices of several processes, and is compared whole on one. Check the "
                "step in one process: on its own devices, or on simulate_cpu_devices(8) with a small model."
            )
        if isinstance(sharding.mesh, Mesh):
            return auto_mesh(sharding.mesh)
    raise ValueError("check_step: state.params has no leaves.")


def _likely_layout(params: PyTree, batch: PyTree, mesh: Mesh, batch_spec: PyTree | None) -> BatchLayout:
    """Returns the ``BatchLayout`` of a custom step's batch: how each leaf is split over the mesh.

    The layout is that of ``batch_spec``. If ``batch_spec`` is None, guesses: dim 0 of every leaf is split over every
    mesh axis of more than one device, except axes over which the model splits a parameter (tensor parallelism,
    experts). If these devices do not divide dim 0 of every leaf, the guess is a replicated batch.
    """
    if batch_spec is not None:
        return batch_layout(mesh, None, batch_spec)
    # Devices along an axis that splits layers receive the same rows.
    model_axes = {axis for _, leaf in trees.sharded_leaves(params) for axis in leaf.model_axes}
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in model_axes)
    rows = [np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    axes = axes if all(count % num_shards(mesh, axes) == 0 for count in rows) else ()
    return BatchLayout(mesh, axes, axes, PartitionSpec(axes), SequenceLayout(CONTIGUOUS, (), axes))


# ---------------------------------------------------------------------------------------------- compared in which order


class StepComparison(NamedTuple):
    """Result of a comparison of a step with one device; ``findings`` are sentences on loss and optimizer calls.

    ``seen`` is the observed step, ``leaves`` are its compared gradients. ``of_model``: the loss differs because the
    split model computes a different function, so gradients must differ, too.
    """

    seen: SeenStep
    leaves: list[LeafCheck]
    findings: list[str]
    loss_ratio: float | None
    of_model: bool

    @property
    def differs(self) -> bool:
        return bool(self.findings) or not _are_right(self.leaves)


class Comparison:
    """Procedure of ``check_step``: compares a step with its loss on one device, and returns a ``StepCheck``.

    Methods return sentences ("findings") on mistakes; a ``Reference`` is loss and gradients computed on one device.
    """

    def __init__(self, step: Callable[..., Any], state: Any, step_args: tuple[Any, ...], one_device: OneDevice):
        self.step, self.state, self.step_args, self.one_device, self.mesh = (
            step,
            state,
            step_args,
            one_device,
            one_device.mesh,
        )
        self.axis_sizes = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        leaves = dict(trees.sharded_leaves(state.params))
        self.axes = {path: tuple(a for a in leaf.axes if a in self.axis_sizes) for path, leaf in leaves.items()}
        # Bounds are multiples of eps. If every leaf is float64, bounds of float32 would hide mistakes.
        wide = all(leaves[path].dtype == np.float64 for path in one_device.paths if hasattr(leaves[path], "dtype"))
        self.eps = float(np.finfo(np.float64 if wide and one_device.paths else np.float32).eps)
        minibatches = {"num_minibatches": one_device.num_minibatches} if one_device.num_minibatches > 1 else {}
        self.compared_state = False  # whether the state of a step's custom optimizer was compared
        self.parts = self.axis_sizes | minibatches  # number of parts by axis, and by minibatches

    def check_ready_step(self) -> StepCheck:
        """Checks a step of ``make_train_step``, and returns the result for ``check_step``.

        Compares the step with the mean over slices: the rows of each device in each minibatch, computed on a single
        device in turn, with the draws of that device. Then compares the mean over slices with the full batch, both with
        equal draws: this shows whether the loss is a mean over rows. The reported ratios are the product: step over
        full batch.
        """
        one_device, rng = self.one_device, self.step_args[1]
        key = jax.random.fold_in(rng, self.state.step)  # the same folding as in the step
        same_key, full_batch = self.with_same_draws(key)
        if one_device.uses_mesh_axes(key):
            return self.of_communicating_loss(same_key, full_batch)
        expected = one_device.slices(key)
        if not expected.is_finite:
            why = report.not_finite(expected) if not full_batch.is_finite else report.NOT_FINITE_SLICES
            return self.checked([why], self.observed(rng, expected))
        draws = one_device.traced(key).draws
        # Slices and batch can be compared only if the same rows draw the same numbers in both.
        mean = one_device.slices(same_key) if draws else expected
        step = self.compared_with(rng, expected)
        of_loss, of_slices, findings = self.objective(same_key, mean, full_batch, step.seen, key)
        # Combine step / slices and slices / batch into step / batch.
        total = [
            leaf._replace(
                ratio=leaf.ratio * of.ratio,
                error=math.hypot(leaf.error, of.error),
                tolerance=leaf.tolerance + of.tolerance,
            )
            for leaf, of in zip(step.leaves, of_slices, strict=True)
        ]
        findings += step.findings + self.of_leaves(total if of_loss.is_count else step.leaves, step.seen, of_loss)
        findings += self.without_gradient(key, expected)
        ratio = None if step.loss_ratio is None else step.loss_ratio * _ratio(mean.loss, full_batch.loss)
        method = "each device's rows with its own draws, one after another" if draws else "each device's rows in turn"
        return self.checked(findings, step.seen, method, total, ratio)

    def of_communicating_loss(self, key: PyTree, full_batch: Reference) -> StepCheck:
        """Checks a step of ``make_train_step`` whose loss has collectives: compares the step with the full batch.

        Args:
          key: a key of constant draws, equal for every device and row, with which the step runs.
          full_batch: loss and gradients of the full batch on a single device, with the same key.
        """
        if not full_batch.is_finite:
            return self.checked([report.not_finite(full_batch)], self.observed(key, full_batch))
        step = self.compared_with(key, full_batch)
        findings = step.findings
        if step.differs:
            of_loss, _, of_objective = self.objective(key, self.one_device.slices(key), full_batch, step.seen, key)
            findings = of_objective or findings
            if not step.of_model and (not of_objective or of_loss.is_count):
                findings += self.of_leaves(step.leaves, step.seen, of_loss)
        findings += self.without_gradient(key, full_batch)
        return self.checked(findings, step.seen, BATCH_AT_ONCE, step.leaves, step.loss_ratio)

    def check_own_step(self) -> StepCheck:
        """Checks a custom step (not of ``make_train_step``), and returns the result for ``check_step``.

        The step runs with a key of constant draws, equal for every device and row, and is compared with the full batch
        on a single device. If the step fails with such a key, or differs and may draw from other keys, means over many
        ordinary keys are compared instead.
        """
        one_device = self.one_device
        key, full_batch = self.with_same_draws(self.step_args[1])
        try:
            seen = self.observed(key, full_batch)
        except Exception:  # a step may use its key in any way, also in ways that a constant key does not support
            return self.by_many_keys("it does not take another kind of key")
        if not full_batch.is_finite:
            return self.checked([report.not_finite(full_batch)], seen)
        step = self.compared_with(key, full_batch, seen)
        # A step that draws from different keys differs by its draws alone; means over many keys decide.
        if step.differs and (why := self.why_other_draws(key)):
            return self.by_many_keys(why)
        method = (
            f"{BATCH_AT_ONCE}, with draws that are the same everywhere"
            if one_device.traced(key).draws
            else BATCH_AT_ONCE
        )
        findings, leaves, ratio = step.findings, step.leaves, step.loss_ratio
        if step.differs and (of_objective := self.own_objective(key, step.seen, full_batch)):
            return self.checked(of_objective, step.seen, method, leaves, ratio)
        tolerance = max([self.eps * ORDER_EPS, *(leaf.tolerance for leaf in leaves)])
        of_loss = Multiple.of(1.0 if ratio is None else ratio, self.axis_sizes, tolerance)
        if not step.of_model:
            findings += self.of_leaves(leaves, step.seen, of_loss)
        findings += self.without_gradient(key, full_batch)
        return self.checked(findings, step.seen, method, leaves, ratio)

    # ------------------------------------------------------------------------------------------------------ compared

    def with_same_draws(self, key: PyTree) -> tuple[Any, Reference]:
        """Returns (a key of constant draws, loss and gradients of the full batch on a single device with this key).

        A constant key replaces each key in the tree ``key``; every draw is then the same fraction u of its range. Tries
        the values u of ``CHOICES`` in order, until loss and gradients are finite and a gradient is nonzero; if no value
        succeeds, returns the results of the last u. For a loss without draws only the first u is tried.
        """
        first, *others = CHOICES
        same_key = constant_like(key, first)
        reference = self.one_device.on_full_batch(same_key)
        # With u near 0 or 1 a dropout drops everything or nothing, and gradients may vanish: then try a different u.
        for u in others:
            if (reference.is_finite and reference.has_gradient) or not self.one_device.traced(key).draws:
                break
            same_key = constant_like(key, u)
            reference = self.one_device.on_full_batch(same_key)
        return same_key, reference

    def observed(self, rng: PyTree, expected: Reference) -> SeenStep:
        """Runs the step once on the mesh with the key ``rng``, and returns the observation of the run.

        The observation has the gradients passed to the optimizer, the loss, and the states before and after. The
        gradients of ``expected`` take the place of gradients that cannot be observed.
        """
        batch, _, *rest = self.step_args
        return observe(self.step, self.state, (batch, rng, *rest), self.one_device.tree(expected.grads), self.mesh)

    def compared_with(self, rng: PyTree, expected: Reference, seen: SeenStep | None = None) -> StepComparison:
        """Compares a run of the step with the reference ``expected``: gradients, loss, and number of optimizer calls.

        Returns a ``StepComparison``: the compared observation, a ``LeafCheck`` per leaf, sentences on mistakes in loss
        and calls (a step must call its optimizer once), and the ratio of the step's loss to the loss of ``expected``.
        For a step that bypasses the state's optimizer, the optimizer state is compared, too, unless an earlier
        comparison fails.

        Args:
          rng: the key of the run; ``expected`` must be computed with the same key.
          expected: loss and gradients on a single device.
          seen: the observation of the run; None: this method runs the step.
        """
        seen, leaves = self.compared(seen or self.observed(rng, expected), expected)
        of_model, findings = self.loss_differs(rng, seen, expected)
        if seen.updates != 1:
            times = f"the step calls its optimizer {seen.updates} times"
            findings.append(f"{times}. Call tx.update, or apply_gradients, once.")
        if seen.state_of_gradients is not None and not findings and _are_right(leaves):
            findings += self.state_differs(seen, expected)
        ratio = _ratio(seen.loss.value, expected.loss) if seen.loss else None
        return StepComparison(seen, leaves, findings, ratio, of_model)

    def compared(self, seen: SeenStep, expected: Reference) -> tuple[SeenStep, list[LeafCheck]]:
        """Compares the observed values of a step, leaf by leaf, with the values that follow from ``expected.grads``.

        The values are gradients or, for a custom step, first moments or updates. Such a step can have two observations,
        first moments and then updates; the second is ``seen.next_observation``, else None. The second observation is
        compared only if every leaf of ``seen`` is right.

        Returns (the last compared observation, a ``LeafCheck`` for each of its leaves).
        """

        def as_seen(reference: Reference) -> dict[str, np.ndarray]:
            return flat(seen.of_gradients(self.one_device.tree(reference.grads)))

        narrow = {**of_wire(self.state.params, expected), **seen.rounding}
        leaves = compare_leaves(
            flat(seen.observed_values),
            as_seen(expected),
            self.axes,
            narrow,
            lambda: as_seen(expected.perturbed()),
            self.eps,
        )
        leaves = [_with_copies(leaf, seen.observed_values[leaf.path]) for leaf in leaves]
        # Correct first moments, say, do not prove the updates correct: compare these next.
        if seen.next_observation is not None and _are_right(leaves):
            return self.compared(seen.next_observation, expected)
        return seen, leaves

    def state_differs(self, seen: SeenStep, expected: Reference) -> list[str]:
        """Compares the optimizer state after a step that bypasses ``state.tx`` with the state on a single device.

        Returns a list of one sentence if the states differ by more than rounding, else []. The state on the single
        device is the result of ``state.tx`` for the gradients of ``expected``. Sets ``self.compared_state`` to True.
        """
        self.compared_state, of_gradients = True, seen.state_of_gradients
        assert of_gradients is not None
        return list(
            of_state(
                by_path(bare(seen.after.opt_state)),
                of_gradients(self.one_device.tree(expected.grads)),
                by_path(bare(seen.before.opt_state)),
                lambda: of_gradients(self.one_device.tree(expected.perturbed().grads)),
                self.eps,
            )
        )

    def of_leaves(self, leaves: list[LeafCheck], seen: SeenStep, of_loss: Multiple) -> list[str]:
        """Returns a sentence for each cause of wrong gradients among ``leaves``; [] if every leaf is right.

        ``seen`` names the compared values ("gradients", "updates"). ``of_loss`` is the ratio of the step's loss to the
        correct loss: gradients wrong by the same ratio get that cause.
        """
        model_axes = self.one_device.model_axes(self.step_args[1])
        return list(report.of_leaves(leaves, seen.value_kind, self.parts, of_loss, model_axes))

    def loss_differs(self, key: PyTree, seen: SeenStep, expected: Reference) -> tuple[bool, list[str]]:
        """Compares the loss of an observed step with the reference ``expected``. Returns (of_model, findings).

        ``findings`` has one sentence if the losses differ by more than rounding, else none. ``of_model`` is True if the
        cause is the model, not the step: a model split over devices (tensor parallel, say) has the step's wrong loss on
        the mesh without the step, too. ``key`` is the key of both losses. (False, []) if the step returns no loss.
        """
        if seen.loss is None:
            return False, []
        # A loss returned in bfloat16 has the rounding error of bfloat16.
        eps = max(self.eps, seen.loss.eps / 8)
        same, tolerance = same_number(seen.loss.value, expected.loss, lambda: expected.perturbed().loss, eps)
        times = Multiple.of(_ratio(seen.loss.value, expected.loss), self.axis_sizes, tolerance)
        if same or times.kind == "equal":
            return False, []
        axes = self.one_device.model_axes(key)
        if axes and self.is_of_model(key, seen.loss.value, eps):
            return True, [report.of_model(times, axes)]
        return False, [report.of_loss(times, self.one_device.loss.weighted)]

    def is_of_model(self, key: PyTree, loss: float, eps: float) -> bool:
        """Returns whether ``loss``, the step's loss, is also the loss of the split model on the mesh, without the step.

        The losses may differ by rounding: by 64 ``eps``, or by the effect of slightly perturbed inputs. ``key`` is the
        key of the step.
        """
        reference = self.one_device.on_mesh(key, self.one_device.num_minibatches)
        return same_number(loss, reference.loss, lambda: reference.perturbed().loss, eps)[0]

    def objective(
        self, key: PyTree, mean: Reference, full_batch: Reference, seen: SeenStep, real_key: PyTree
    ) -> tuple[Multiple, list[LeafCheck], list[str]]:
        """Checks that the loss is a mean over rows: that the mean over slices equals the loss of the full batch.

        Args:
          key: the key of constant draws with which ``mean`` and ``full_batch`` were computed.
          mean, full_batch: loss and gradients without the step: averaged over slices (each device's rows in each
            minibatch), and of the full batch at once on a single device.
          seen: the observed step; only the dtype of its loss is used, for the tolerance.
          real_key: the key for a further test of a loss that draws from keys other than its argument: whether two
            halves of the batch may exchange rows.
        Returns:
          The ratio of the loss of ``mean`` to the loss of ``full_batch``, interpreted as a number of devices where
          possible; the compared gradients, a ``LeafCheck`` per leaf; and sentences on the mistake, [] for a mean over
          rows.
        """
        if self.one_device.num_minibatches > 1 and self.one_device.overwritten():
            mean = self.one_device.slices(key, minibatches=1)  # scales change between minibatches
        narrow, perturbed = of_wire(self.state.params, mean), lambda: flat(full_batch.perturbed().grads)
        leaves = compare_leaves(flat(mean.grads), flat(full_batch.grads), self.axes, narrow, perturbed, self.eps)
        eps = max(self.eps, seen.loss.eps / 8 if seen.loss else 0)
        same, tolerance = same_number(mean.loss, full_batch.loss, lambda: full_batch.perturbed().loss, eps)
        # On the mesh, JAX differentiates the model's communication without the library, so these gradients prove
        # nothing about rows if the loss is correct.
        of_rows = not self.one_device.needs_all_devices(key)
        if (
            same and (_are_right(leaves) or not of_rows)
        ) or self.one_device.devices * self.one_device.num_minibatches == 1:
            return Multiple("equal"), leaves, []
        tolerance, ratio = max(tolerance, ORDER_EPS * self.eps), _ratio(mean.loss, full_batch.loss)
        times = Multiple.of(ratio, self.parts, tolerance)
        of_draws = self.one_device.traced(key)
        if not times.is_count and of_draws.draws:
            if not of_draws.draws_from_other_keys:  # what a row draws may depend on its position
                over = multiple_over_draws(self.one_device, key, self.parts)
            else:  # draws from other keys differ between slices and batch, whatever the loss
                over = (
                    Multiple.of(ratio, self.parts, ROUGHLY)
                    if is_sum_over_positions(self.one_device, real_key)
                    else None
                )
            if over is not None:
                lines = [] if over.kind == "equal" else [report.of_loss(over, self.one_device.loss.weighted)]
                return over, [leaf._replace(ratio=1.0, error=0.0) for leaf in leaves], lines
        return (
            times,
            leaves,
            list(why_no_mean(self.one_device, key, mean, full_batch, leaves, times, self.parts, tolerance)),
        )

    def own_objective(self, key: PyTree, seen: SeenStep, full_batch: Reference) -> list[str]:
        """Returns sentences that the loss is no mean over rows, if a custom step's gradients are the mean over slices.

        Slices are the rows of each device. ``full_batch`` has loss and gradients of the full batch, from which the
        gradients of ``seen``, the observed step, differ. Returns [] if the batch is not split, or if these gradients
        differ from the mean over slices, too: the loss then does not explain the difference. ``key`` is a key of
        constant draws.
        """
        if not self.one_device.axes:
            return []
        mean = self.one_device.slices(key)
        if not _are_right(self.compared(seen, mean)[1]):
            return []
        return self.objective(key, mean, full_batch, seen, self.step_args[1])[2]

    def without_gradient(self, key: PyTree, expected: Reference) -> list[str]:
        """Returns one sentence, in a list, on the trainable leaves on which the loss does not depend; [] without these.

        If every gradient is 0 for any parameters, the sentence says so. Also [] if no leaf of ``expected``, the
        gradients on a single device, is 0 in every entry. Gradients that are 0 by chance do not count: the loss is
        computed with other parameters and draws, and its equations are read. ``key`` is the key of the loss.
        """
        zero = {path for path, leaf in expected.grads.items() if leaf.size and not np.any(np.asarray(leaf))}
        if not zero:
            return []
        # A gradient may be 0 just for these parameters and draws (ReLU, zero initialisation), so try others.
        # A constant key, as in the comparison, needs no further compilation; without draws it serves both.
        constant = constant_like(key)
        keys = constant, key if self.one_device.traced(key).draws else constant
        elsewhere = (self.one_device.on_full_batch(rng, elsewhere=i) for i, rng in enumerate(keys, start=1))
        if not any(reference.has_gradient for reference in (expected, *elsewhere)):
            return list(report.zero_gradient_lines(list(expected.grads), len(expected.grads)))
        # The gradient of a leaf in which the loss is linear depends on nothing, either, but is not 0.
        unconnected = [path for path in self.one_device.unconnected(key) if path in zero]
        return list(report.zero_gradient_lines(unconnected, len(expected.grads)))

    # ------------------------------------------------------------------------------------------ draws from other keys

    def why_other_draws(self, key: PyTree) -> str:
        """Returns the reason why loss or step may draw from keys other than their argument, as a clause; else "".

        The equations of loss and step, traced with the constant key ``key``, show the draws. A step that cannot be
        traced is a reason, too.
        """
        if self.one_device.traced(key).draws_from_other_keys:
            return "loss_fn draws from another key than the one that it is given"
        batch, _, *rest = self.step_args
        # ``observe`` ran one of the two states. Disable the state's optimizer: its noise does not affect gradients.
        silent = self.state.replace(tx=optax.set_to_zero(), opt_state=optax.EmptyState())
        for state in (recorded_state(silent, self.mesh), self.state):
            with contextlib.suppress(Exception):  # some steps do more than JAX can trace
                foreign = traced(jax.make_jaxpr(self.step)(state, batch, key, *rest)).draws_from_other_keys
                return "it draws from another key than the one that it is given" if foreign else ""
        return "it cannot be traced, so that its draws are unknown"

    def by_many_keys(self, why: str) -> StepCheck:
        """Checks a custom step by means over many keys, and returns the result for ``check_step``.

        The means of the step's gradients and loss are compared with the means of a single device. ``why`` is the reason
        against constant draws, for the text of the result. The verdict is "cannot tell" if the means of a leaf stay too
        uncertain. The step counter is advanced for each key, since a step may fold the counter into its key.
        """
        cache: dict[str, Any] = {}

        def sample(i: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
            rng = folded(self.step_args[1], i)
            expected = self.one_device.on_full_batch(rng)
            moved = Comparison(self.step, self.state.replace(step=self.state.step + i), self.step_args, self.one_device)
            seen = cache["seen"] = moved.observed(rng, expected)
            actual_values, expected_values = (
                flat(seen.observed_values),
                flat(seen.of_gradients(self.one_device.tree(expected.grads))),
            )
            if seen.loss is not None:
                actual_values[LOSS], expected_values[LOSS] = np.array([seen.loss.value]), np.array([expected.loss])
            return actual_values, expected_values

        by_path, count = ratios(sample)
        seen = cache["seen"]
        leaves = [
            _with_copies(
                LeafCheck(path, self.axes.get(path, ()), of.value, of.relative_residual, of.allowed),
                seen.observed_values[path],
            )
            for path, of in by_path.items()
            if path != LOSS
        ]
        loss = by_path.get(LOSS)
        of_loss = Multiple.of(loss.value, self.axis_sizes, loss.allowed) if loss else Multiple("equal")
        findings = [report.of_loss(of_loss, self.one_device.loss.weighted)] if of_loss.kind != "equal" else []
        findings += self.of_leaves(leaves, seen, of_loss)
        method = f"means over {count} keys, since {why}"
        ratio = loss.value if loss else None
        unknown = [path for path, of in by_path.items() if not of.is_known]
        if unknown and not any(leaf.copies_differ for leaf in leaves):
            return self.checked([report.unknown_lines(unknown, why, count)], seen, method, leaves, ratio, CANNOT_TELL)
        return self.checked(findings, seen, method, leaves, ratio)

    def checked(
        self,
        findings: list[str],
        seen: SeenStep,
        method: str = "",
        leaves: list[LeafCheck] | None = None,
        loss_ratio: float | None = None,
        verdict: str | None = None,
    ) -> StepCheck:
        """Runs the remaining checks (collections, padded rows, optimizer), and returns the result with all findings.

        Args:
          findings: sentences of the earlier checks.
          seen: the observed step.
          method, leaves, loss_ratio: fields of the ``StepCheck``, for its text.
          verdict: ``CANNOT_TELL`` if the earlier checks are inconclusive; the result is wrong all the same if the
            optimizer's update is. None: wrong with any finding, else right; if the update cannot be compared and
            nothing is wrong, "cannot tell".
        """
        findings = [*findings, *drifting(seen.collections), *padded_row_findings(self.one_device, *self.step_args[:2])]
        mesh = dict(self.mesh.shape)
        update = self.update_of(seen, is_right=not findings)
        unknown = verdict == CANNOT_TELL
        if update.findings:
            # A wrong update is known to be wrong, whether or not gradients could be compared.
            findings, verdict = [*([] if unknown else findings), *update.findings], WRONG
        elif update.unknown and not findings:
            findings, verdict = [*update.unknown], CANNOT_TELL
        verdict = verdict or (WRONG if findings else RIGHT)
        return StepCheck(
            verdict, tuple(findings), seen.value_kind, method, mesh, tuple(leaves or ()), loss_ratio, update.compared
        )

    def update_of(self, seen: SeenStep, is_right: bool) -> UpdateCheck:
        """Compares the optimizer's update in the step with the update on a single device, from the same gradients.

        Returns an ``UpdateCheck``: sentences on mistakes, reasons for missing comparisons, and the compared parts. With
        ``is_right`` (no finding so far), compares also the update of a second step, and the collections. For a step
        that bypasses the state's optimizer, only frozen leaves are compared here.
        """
        if seen.value_kind != "gradients":
            frozen = list(of_frozen(seen.before, seen.after))
            unknown = () if self.shows_gradients(seen) else (report.NOTHING_SHOWS,)
            return UpdateCheck(tuple(frozen), unknown, ("the optimizer's state",) if self.compared_state else ())
        rng = self.step_args[1]
        value_fn = None if self.one_device.traced(rng).draws else self.one_device.value_fn(rng)
        again = seen.run_second_step if is_right else None
        update = check_update(seen.before, seen.after, self.one_device.one_device, again, value_fn)
        if is_right and not update.findings and self.knows_collections(rng):
            of = self.of_collections(seen, rng)
            return update._replace(findings=tuple(of), compared=(*update.compared, "collections"))
        return update

    def knows_collections(self, rng: PyTree) -> bool:
        """Returns whether the collections after the step can be compared with those that a single device computes.

        True if the state has collections, the loss, traced with the key ``rng``, draws nothing, there is one minibatch,
        and the loss sees the statistics of the full batch: the batch is not split, or the loss communicates over the
        axes of the batch. False for a state with scales of fp8 products.
        """
        collections, one_device = collections_of(self.state), self.one_device
        is_whole = one_device.num_minibatches == 1 and (one_device.devices == 1 or one_device.needs_all_devices(rng))
        return bool(collections) and OVERWRITTEN not in collections and is_whole and not one_device.traced(rng).draws

    def of_collections(self, seen: SeenStep, rng: PyTree) -> list[str]:
        """Compares the collections after the step with those after the full batch on a single device.

        Returns a list of one sentence on the collections that differ by more than rounding; [] if they are equal.
        ``rng`` is the key of the loss on the single device.
        """
        actual, before = (
            by_path(bare(readable(dict(tree)))) for tree in (seen.collections, collections_of(self.state))
        )
        expected, perturbed = (partial(self.one_device.collections_after, rng, shake) for shake in (False, True))
        return list(
            of_collections(actual, by_path(bare(expected())), before, lambda: by_path(bare(perturbed())), self.eps)
        )

    def shows_gradients(self, seen: SeenStep) -> bool:
        """Returns whether other gradients would change the observed values: then equal values prove equal gradients.

        False only for a step with a custom optimizer whose updates and state are the same for gradients of 0 and of 1,
        as with a learning rate of 0.
        """
        of_state = seen.state_of_gradients
        if seen.value_kind != "updates" or of_state is None:
            return True
        pairs = [(seen.of_gradients(grads), of_state(grads)) for grads in self.one_device.two_gradients()]
        return any(not same_bits(*leaves) for leaves in zip(*map(jax.tree.leaves, pairs), strict=True))


def _with_copies(leaf: LeafCheck, value: jax.Array) -> LeafCheck:
    return leaf._replace(copies_differ=copies_differ(value), differ_along=differ_along(value))


def _ratio(actual: float, expected: float) -> float:
    return actual / expected if expected else (1.0 if actual == expected else math.inf)


def _are_right(leaves: list[LeafCheck]) -> bool:
    return all(leaf.is_equal and not leaf.copies_differ for leaf in leaves)
