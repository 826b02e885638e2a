"""Reference of a step, computed on one device: the plain model with unsharded weights, and no gather.

  slices   slice (i, j) is the batch of device i in minibatch j, with the key of the device and minibatch; slices run
           in sequence, then their losses and gradients are averaged, by weight if losses have weights
  whole    the full batch at once

A step that averages correctly returns the mean of the slices: with equal draws it differs by rounding alone. If the
loss is a mean over rows, slices and full batch agree too, provided that both draw the same numbers (``draws``).

Slices of a loss that communicates along an axis of the batch (statistics over devices) cannot run in sequence. They run
on the mesh instead, with unsharded weights on each device, and JAX differentiates the ``shard_map``. A model that is
split over another axis (tensor parallel) is unsplit on one device, and its slices run in sequence, free of any mistake
of the split.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.extension import named_wires, with_extensions
from xlstm_jax.distributed.data_parallel.leaf import Sharded, split_by_model, true_value
from xlstm_jax.distributed.data_parallel.shard import gather_params
from xlstm_jax.distributed.data_parallel.trees import readable
from xlstm_jax.distributed.data_parallel.wire.collectives import axes_entry, entry_axes, is_prng_key, wide_dtype
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS, RunningLoss
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout, num_shards
from xlstm_jax.distributed.model_parallel.sequence_layout import in_natural_order, layout_context
from xlstm_jax.distributed.training.accumulation import MinibatchResult, mean_over, rows_at, split_rows
from xlstm_jax.distributed.training.arguments import collections_of
from xlstm_jax.distributed.training.carries import carries_of
from xlstm_jax.distributed.training.carries.carry import Inputs
from xlstm_jax.distributed.training.gradients import LossFunction
from xlstm_jax.distributed.training.step_check.draws import Traced, folded, traced
from xlstm_jax.distributed.training.varying import differing_axes

MATMUL_EPS = {"tpu": 2.0**-7, "gpu": 2.0**-10}  # float32 products at default precision: bfloat16, TF32
COARSEST_EPS = 2.0**-7  # eps of bfloat16; coarser formats (float8) round once, not in each operation
WHOLE = PartitionSpec()


class Reference(NamedTuple):
    """Loss, and gradients by path, computed on one device: the reference for a step.

    ``sizes`` are the absolute values of gradients, averaged over slices. ``perturbed()`` repeats the computation with
    parameters and batch changed at random by about a rounding error.
    """

    loss: float
    grads: dict[str, jax.Array]
    sizes: dict[str, jax.Array]
    perturbed: Callable[[], "Reference"]

    @property
    def not_finite(self) -> list[str]:
        """Returns the paths of gradients with an infinite or NaN entry; [] if every gradient is finite."""
        values = {path: np.asarray(leaf, np.complex128) for path, leaf in self.grads.items()}
        return [path for path, leaf in values.items() if not np.all(np.isfinite(leaf))]

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.loss)) and not self.not_finite

    @property
    def has_gradient(self) -> bool:
        """Returns whether any gradient has a nonzero entry."""
        return any(np.any(np.asarray(leaf)) for leaf in self.grads.values())  # np.any of a JAX array would compile


class _Weights(NamedTuple):
    """Values that the loss reads besides the differentiated trainable values, unsharded.

    Attributes:
      base: the trainable parameters of the state.
      rounded: the trainable parameters after an 8-bit gather; None for a parameter without an 8-bit gather.
      rest: the frozen parameters.
      extra_trees: further trees of the step by name, as modules read them after a gather.
    """

    base: list[Any]
    rounded: list[Any]
    rest: list[Any]
    extra_trees: Mapping[str, PyTree]


class OneDevice:
    """Computes the loss of a step and its gradients without FSDP, on the first device of the mesh.

    Has the state and the batch; ``rng`` of the methods is the key of the step.
    """

    def __init__(
        self,
        loss: LossFunction,
        layout: BatchLayout,
        num_minibatches: int,
        state: Any,
        batch: PyTree,
        mesh: Mesh,
        extra_trees: Mapping[str, PyTree] = MappingProxyType({}),
    ):
        self.loss = replace(loss, fn=with_extensions(loss.fn), has_collections=bool(collections_of(state)))
        # The batch is in natural order here; its slices are the parts that devices have on the mesh.
        self.layout, self.axes, self.num_minibatches = layout.of_batch(batch), layout.axes, num_minibatches
        batch = in_natural_order(batch)
        self.mesh, self._apply_fn = mesh, state.apply_fn
        # A mesh with the same axes, for losses that use axis names.
        self.one_device = self._one = Mesh(mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim), mesh.axis_names)
        _, self._put_back = trees.split_differentiable(state.params)
        trained = {path: leaf for path, leaf in trees.sharded_leaves(state.params) if leaf.is_differentiable}
        self.paths, self._leaves = list(trained), list(trained.values())
        trainable_values = list(map(true_value, self._leaves))
        frozen_values = [leaf for _, leaf in trees.sharded_leaves(state.params) if not leaf.is_differentiable]
        self._rest, collections = frozen_values, collections_of(state)
        # Kernels of fp8 products have a wire format of their product, which rounds them on one device, too.
        boxes = {f"params/{path}": leaf for path, leaf in trained.items()}
        by_extension = named_wires(collections, lambda path: boxes[path].communication)
        rounded = [None if path in by_extension else _rounded_on_mesh(leaf, mesh) for path, leaf in boxes.items()]
        boxed = trees.map_leaves(split_by_model, dict(extra_trees))
        self._of_others = trees.map_sharded(_spec_of_model, boxed)
        arrived = trees.map_sharded(partial(_arrived, mesh=mesh), boxed)
        weights = _Weights(trainable_values, rounded, list(map(true_value, frozen_values)), arrived)
        self._inputs = self._put(
            (trainable_values, weights, batch, (readable(collections),) if collections else ()), self._one
        )
        self._jitted: dict[Any, Any] = {}
        self._traced: dict[str, Traced] = {}

    def _put(self, tree: PyTree, mesh: Mesh) -> Any:
        return jax.device_put(tree, NamedSharding(mesh, WHOLE))

    @property
    def batch(self) -> PyTree:
        return self._inputs[2]

    @property
    def devices(self) -> int:
        """Returns the number of parts into which the mesh splits the batch: devices along the axes of the batch."""
        return num_shards(self.mesh, self.axes)

    def slice_of(self, batch: PyTree, device: Any, minibatch: Any, minibatches: int) -> PyTree:
        """Returns a slice of a global batch: the rows of a device in a minibatch.

        Args:
          batch: a global batch, after ``BatchLayout.reorder`` has put tokens into the order of the devices.
          device: the row-major index of the device over the axes of the batch, an int or traced.
          minibatch, minibatches: the index of the minibatch, and the number of minibatches.
        """
        return rows_at(split_rows(self.layout.part(batch, device), minibatches), minibatch)

    def all_slices(self) -> Iterator[PyTree]:
        """Yields the rows of each device in each minibatch, as a batch; the first device's minibatches come first."""
        batch = self.layout.reorder(self.batch)
        for device, minibatch in itertools.product(range(self.devices), range(self.num_minibatches)):
            yield self.slice_of(batch, device, minibatch, self.num_minibatches)

    def tree(self, grads: dict[str, jax.Array]) -> PyTree:
        """Returns gradients by path as a tree like the parameters, with None for leaves that take no gradient.

        ``grads`` has an entry for each trainable leaf. Optimizers take gradients in this form.
        """
        return self._put_back([grads[path] for path in self.paths], fill_other=lambda leaf: None)

    def two_gradients(self) -> list[PyTree]:
        """Returns two trees of gradients: every entry 0, and every entry 1.

        The trees are like the parameters, with None for leaves that take no gradient.
        """
        trainable_values = dict(zip(self.paths, self._inputs[0], strict=True))
        return [self.tree({path: jnp.full_like(x, value) for path, x in trainable_values.items()}) for value in (0, 1)]

    def slices(self, rng: PyTree, minibatches: int | None = None) -> Reference:
        """Returns loss and gradients averaged over slices, the rows of each device in each minibatch.

        Each slice uses ``rng`` folded with the device and the minibatch, as in the step. Slices run in sequence on a
        single device; if the loss communicates over the axes of the batch, they run on the mesh.

        Args:
          rng: the key of the step.
          minibatches: the number of minibatches; None: that of the step.
        """
        count = self.num_minibatches if minibatches is None else minibatches
        if self.needs_all_devices(rng):
            return self.on_mesh(rng, count)
        return self._run(self._mean_in_turn, (self.devices, count), rng)

    def on_mesh(self, rng: PyTree, minibatches: int) -> Reference:
        """Returns loss and gradients averaged over slices (a device's rows in a minibatch) that run on the mesh.

        Parameters are unsharded on each device, except over the model's axes (tensor parallel), and JAX differentiates
        the ``shard_map``. ``minibatches`` is the number of minibatches.
        """
        return self._run(self._mean_on_mesh, (minibatches,), rng)

    def on_full_batch(self, rng: PyTree, batch: PyTree = None, elsewhere: int = 0) -> Reference:
        """Returns loss and gradients of the full batch at once on a single device, without slices.

        Args:
          rng: the key of the step.
          batch: a global batch in place of the batch of the check; None: the batch of the check.
          elsewhere: if not 0, a seed: the gradients are those at other, randomly moved parameters.
        """
        return self._run(self._mean_in_turn, (1, 1), rng, batch, elsewhere)

    def collections_after(self, rng: PyTree, shake: bool) -> PyTree:
        """Returns the collections, such as batch statistics, that the loss of the full batch returns on one device.

        ``rng`` is the key of the loss. With ``shake`` each entry of parameters and batch is first changed at random by
        about a rounding error (``perturbed``). Both results together show the effect of rounding on the collections.
        """
        trainable_values, weights, batch, collections = self._inputs
        trainable_values, batch = (
            perturbed((trainable_values, batch), self.eps(rng)) if shake else (trainable_values, batch)
        )

        def after(trainable_values: Any, weights: _Weights, batch: PyTree, collections: Any, rng: PyTree) -> PyTree:
            _, (_, (updated,)) = self._terms(trainable_values, weights, batch, rng, collections)
            return updated

        if "collections" not in self._jitted:  # compiled once, with and without `shake`
            run = jax.shard_map(after, mesh=self._one, in_specs=WHOLE, out_specs=WHOLE, check_vma=False)
            self._jitted["collections"] = jax.jit(run)
        inputs = self._put((trainable_values, weights, batch, collections, rng), self._one)
        return self._jitted["collections"](*inputs)

    def value_fn(self, rng: PyTree) -> Callable[[PyTree], jax.Array]:
        """Returns a function from parameters to the loss of the full batch, for optimizers with line searches.

        The function takes a tree with only the trainable leaves, and returns a scalar. The draws are those of ``rng``.
        """
        _, weights, batch, collections = self._inputs

        def value(params: PyTree) -> jax.Array:
            loss, *_ = self._mean_in_turn(1, 1)(jax.tree.leaves(params), weights, batch, collections, rng)
            return loss

        return value

    def _run(
        self,
        make: Callable[..., Any],
        parts: tuple[int, ...],
        rng: PyTree,
        batch: PyTree = None,
        elsewhere: int = 0,
        shake: bool = False,
    ) -> Reference:
        """Runs the function ``make(*parts)``, compiled, on the inputs of the check; returns loss and gradients.

        Args:
          make: ``_mean_in_turn`` or ``_mean_on_mesh``; the compiled function is kept for each pair of ``make`` and
            ``parts``.
          parts: the arguments of ``make``, such as the numbers of devices and minibatches.
          rng: the key of the step.
          batch: a global batch; None: the batch of the check.
          elsewhere: if not 0, a seed, with which the parameters are first moved at random.
          shake: whether parameters and batch are first changed at random by about a rounding error.
        """
        trainable_values, weights, own_batch, collections = self._inputs
        batch = own_batch if batch is None else batch
        trainable_values, batch = (
            perturbed((trainable_values, batch), self.eps(rng)) if shake else (trainable_values, batch)
        )
        trainable_values = _other_parameters(trainable_values, elsewhere) if elsewhere else trainable_values
        # Compile once per way to cut the batch: keys, batches and perturbed inputs are arguments.
        if (make, parts) not in self._jitted:
            self._jitted[make, parts] = jax.jit(make(*parts))
        mesh = self.mesh if make == self._mean_on_mesh else self._one
        loss, grads, sizes = self._jitted[make, parts](
            *self._put((trainable_values, weights, batch, collections, rng), mesh)
        )
        grads, sizes = (dict(zip(self.paths, values, strict=True)) for values in self._put((grads, sizes), self._one))
        again = cache(partial(self._run, make, parts, rng, batch, elsewhere, shake=True))
        return Reference(float(loss), grads, sizes, again)

    # ------------------------------------------------------------------------------------ facts read off the equations

    def eps(self, rng: PyTree) -> float:
        """Returns the eps of the narrowest dtype in which the loss is computed on these devices.

        At most the eps of bfloat16. Counts the dtypes in the loss, traced with the key ``rng``, and the reduced
        precision of float32 matrix products on TPUs and GPUs.
        """
        platform = self.mesh.devices.flat[0].platform
        return min(max(self.traced(rng).eps, MATMUL_EPS.get(platform, 0.0)), COARSEST_EPS)

    def traced(self, rng: PyTree) -> Traced:
        """Traces the loss on the mesh, and returns facts read off the equations: draws, mesh axes, narrowest dtype.

        ``rng`` is a key like that of the step; the loss is traced once for each type of key.
        """
        trainable_values, *other_inputs = self._inputs
        if (key := str(jax.tree.map(jax.typeof, rng))) not in self._traced:
            jaxpr = jax.make_jaxpr(self._terms_on_mesh(1))(trainable_values, *other_inputs, rng)
            self._traced[key] = traced(jaxpr)
        return self._traced[key]

    def unconnected(self, rng: PyTree) -> list[str]:
        """Returns the paths of trainable leaves whose gradient depends on neither parameters nor batch.

        Reads the equations of the gradients. The gradient of a listed leaf is always 0, because the loss does not
        depend on the leaf, or always the same number, because the loss is linear in the leaf alone.
        """
        trainable_values, weights, batch, collections = self._inputs
        flat, treedef = jax.tree.flatten((trainable_values, batch))

        def grads(*leaves: Any) -> list[Any]:
            trainable_values, batch = jax.tree.unflatten(treedef, leaves)
            return list(self._mean_in_turn(1, 1)(trainable_values, weights, batch, collections, rng)[1])

        # Read the equations: a gradient may have the value 0 (dead units) although it depends on the leaf.
        of_grads = differing_axes(grads, flat, [frozenset({"anything"})] * len(flat))
        return [path for path, of in zip(self.paths, of_grads, strict=True) if not of]

    def uses_mesh_axes(self, rng: PyTree) -> bool:
        """Returns whether the loss has a collective along any mesh axis, or reads a device index along an axis."""
        return bool(self.traced(rng).axes)

    def needs_all_devices(self, rng: PyTree) -> bool:
        """Returns whether the loss has a collective, or reads a device index, along an axis of the batch.

        Slices (the rows of a device) then cannot run in sequence on a single device.
        """
        return bool(self.traced(rng).axes & set(self.axes))

    def model_axes(self, rng: PyTree) -> tuple[str, ...]:
        """Returns the mesh axes over which the model is split (tensor parallel, experts), in mesh order.

        These are the axes of more than one device that the loss uses in collectives, and that do not split the batch.
        """
        model_axes = self.traced(rng).axes - set(self.axes)
        return tuple(axis for axis, size in self.mesh.shape.items() if size > 1 and axis in model_axes)

    def overwritten(self) -> list[str]:
        """Returns the names of the collections that a step replaces by their gradient, as scales of fp8 products."""
        return [name for carry in carries_of(Inputs(self.axes, *self._inputs[3])) for name in carry.overwritten]

    # ------------------------------------------------------------------------------------- one part after another

    def _terms(
        self, trainable_values: list[Any], weights: _Weights, batch: PyTree, rng: PyTree, collections: Any
    ) -> tuple[Any, Any]:
        """Returns (sum of losses, (sum of weights, updated collections)) of a batch, for a weighted loss.

        For a loss that is a mean: (mean, (1, updated collections)). Sum and weight are in float32 or wider.

        Args:
          trainable_values: the trainable parameters, unsharded arrays; the loss is differentiated by these.
          weights: the remaining parameters: rounded values of 8-bit gathers, frozen parameters, and extra trees.
          batch, rng: a batch or a slice, and its key.
          collections: (collections by name,), or () for a model without collections. The updated collections have the
            same form.
        """
        at_start = zip(self._leaves, trainable_values, weights.base, weights.rounded, strict=True)
        frozen_values = iter(weights.rest)
        params = self._put_back([_as_gathered(*leaf) for leaf in at_start], fill_other=lambda leaf: next(frozen_values))
        with set_context(RUNNING_LOSS, RunningLoss(is_reference=True)), layout_context(self.layout.sequence):
            loss = self.loss(params, self._apply_fn, batch, rng, *collections, **weights.extra_trees)
        if collections:
            collections = ({**collections[0], **readable(dict(loss.collections))},)
        wide = wide_dtype(jnp.result_type(loss.total))
        weight = jnp.asarray(1 if loss.weight is None else loss.weight, wide)
        return jnp.asarray(loss.total, wide), (lax.stop_gradient(weight), collections)

    def _mean_in_turn(self, devices: int, minibatches: int) -> Callable[..., Any]:
        """Returns a function that computes loss and gradients of slices in sequence on a single device.

        A slice is the rows of one of ``devices`` devices in one of ``minibatches`` minibatches. The function takes
        (trainable values, ``_Weights``, global batch, collections, key), and returns (loss, gradients, magnitudes).
        Magnitudes are the absolute values of each slice's gradients. Each of the three is a weighted mean over slices:
        a slice has the weight that the loss function returns for its rows (the number of tokens, say), or 1 if the loss
        returns no weight. Gradients and magnitudes are lists in the order of the trainable values.
        """
        parts = devices * minibatches

        def mean(live: Any, weights: _Weights, batch: PyTree, collections: Any, rng: PyTree) -> Any:
            batch = batch if parts == 1 else self.layout.reorder(batch)
            names = self.overwritten()

            def rows_and_key(device: Any, minibatch: Any) -> tuple[PyTree, PyTree]:
                rows = batch if parts == 1 else self.slice_of(batch, device, minibatch, minibatches)
                return rows, _key_of(rng, device, minibatch, minibatches)

            def weight_over_devices(minibatch: Any) -> Any:
                if not self.loss.weighted:
                    return devices
                each = lambda device: self._terms(live, weights, *rows_and_key(device, minibatch), collections)[1][0]  # noqa: E731
                total = lax.map(each, jnp.arange(devices)).sum()
                return jnp.where(total == 0, 1, total)  # 0 for a minibatch of padded rows alone

            def on_slice(index: Any, states: tuple[Any, Any]) -> MinibatchResult:
                minibatch, device = index // devices, index % devices
                rows, key = rows_and_key(device, minibatch)
                # Each device starts a minibatch from the same collections.
                is_first = partial(jnp.where, device == 0)
                before = jax.tree.map(is_first, states[1], states[0])
                scales, with_scales = _split(before, names)
                # Scales of fp8 need gradients of a term of the global mean: fp8 would clip gradients of a sum.
                count = weight_over_devices(minibatch) if names else 1

                def term(live: Any, scales: Any) -> Any:
                    total, (weight, after) = self._terms(live, weights, rows, key, with_scales(before, scales))
                    return total / count, (total, weight, after)

                (_, (total, weight, after)), grads = jax.value_and_grad(term, (0, 1), has_aux=True)(live, scales)
                # The next scales are the maximum over devices.
                earlier, _ = _split(states[1], names)
                largest: list[Any] = [is_first(g, jnp.maximum(g, x)) for g, x in zip(grads[1], earlier, strict=True)]
                grads = [(g * count).astype(wide_dtype(g.dtype)) for g in grads[0]]
                # Average totals and weights separately: the mean loss is their ratio.
                values = (total, weight, list(map(jnp.abs, grads)))
                return MinibatchResult(values, grads, 1, (before, with_scales(after, largest)))

            result = mean_over(on_slice, parts, (collections, collections))
            total, weight, sizes = result.values
            return _means(total, weight, result.grads, sizes)

        return jax.shard_map(mean, mesh=self._one, in_specs=WHOLE, out_specs=WHOLE, check_vma=False)

    # ------------------------------------------------------------------------------------------------- on the mesh

    def _terms_on_mesh(self, minibatches: int) -> Callable[..., Any]:
        """Returns a function that computes, on the mesh, each device's sum of losses and sum of weights.

        For a loss that is a mean, these are each device's mean, and 1. The function takes (trainable values,
        ``_Weights``, global batch, collections, key), and returns two arrays with an entry per device, averaged over
        ``minibatches``.
        """
        devices, axes = self.devices, trees.spread_spec([self.axes], self.mesh)
        of_batch = self.layout.specs(self.batch, spread=True)
        collections = self._inputs[3]
        of_live, of_rest = (list(map(_spec_of_model, leaves)) for leaves in (self._leaves, self._rest))
        of_weights = _Weights(of_live, of_live, of_rest, self._of_others)

        def local(live: Any, weights: Any, batch: PyTree, collections: Any, rng: PyTree, index: Any) -> tuple[Any, Any]:
            def on_minibatch(j: Any, collections: Any) -> MinibatchResult:
                rows, key = rows_at(split_rows(batch, minibatches), j), _key_of(rng, index[0], j, minibatches)
                total, (weight, collections) = self._terms(live, weights, rows, key, collections)
                return MinibatchResult((total, weight), [], 1, collections)

            return jax.tree.map(lambda x: x[None], mean_over(on_minibatch, minibatches, collections).values)

        # Parameters enter unsharded, split only over the axes of the model itself.
        in_specs = (of_live, of_weights, of_batch, trees.partition_specs(collections, self.mesh), WHOLE, axes)
        places: dict[str, Any] = {"in_specs": in_specs, "out_specs": axes}
        spread: Callable[..., Any] = jax.shard_map(local, mesh=self.mesh, check_vma=False, **places)

        def of_all(live: Any, weights: Any, batch: PyTree, *rest: Any) -> Any:
            return spread(live, weights, self.layout.reorder(batch), *rest, jnp.arange(devices))

        return of_all

    def _mean_on_mesh(self, minibatches: int) -> Callable[..., Any]:
        """Returns a function that computes loss and gradients averaged over slices, with each device at its own slices.

        A slice is the rows of a device in one of ``minibatches`` minibatches. The function takes (trainable values,
        ``_Weights``, global batch, collections, key), and returns (loss, gradients, magnitudes), weighted means over
        slices; gradients and magnitudes are lists in the order of the trainable values. Magnitudes, the absolute values
        of each slice's gradients, are estimated: the absolute mean gradient times the square root of the number of
        devices.
        """
        terms = self._terms_on_mesh(minibatches)

        def mean(live: Any, *rest: Any) -> Any:
            def summed(live: Any) -> tuple[Any, Any]:
                totals, weights = terms(live, *rest)
                return totals.sum(), weights.sum()

            (total, weight), grads = jax.value_and_grad(summed, has_aux=True)(live)
            # Local gradients are unknown here; estimate their size: the mean of N vectors in random directions is
            # sqrt(N) times smaller than each.
            return _means(total, weight, grads, [jnp.abs(g) * np.sqrt(self.devices) for g in grads])

        return mean


def _split(collections: Any, names: Collection[str]) -> tuple[list[jax.Array], Callable[[Any, list[jax.Array]], Any]]:
    """Returns the differentiable leaves of the collections ``names``, and a function that puts leaves into collections.

    The function takes collections like ``collections`` and a list of new leaves, in the order of the first result, and
    returns the collections with the new leaves. ``collections`` is a tuple of one mapping {name: collection}, or ()
    without collections; ``names`` must then be empty.
    """
    scales, put_back = trees.split_differentiable({name: collections[0][name] for name in names})
    return scales, lambda collections, leaves: ({**collections[0], **put_back(leaves)},) if names else collections


def _key_of(rng: PyTree, device: Any, minibatch: Any, minibatches: int) -> Any:
    """Returns the key of a slice: ``rng`` folded with the index of the device, then with the index of the minibatch.

    With a single minibatch, folded with the device alone, as in ``make_train_step``.
    """
    device_key = folded(rng, device)
    return device_key if minibatches == 1 else folded(device_key, minibatch)


def _means(total: Any, weight: Any, grads: list[Any], sizes: list[Any]) -> tuple[Any, Any, Any]:
    weight = jnp.where(weight != 0, weight, 1)
    return total / weight, [g / weight for g in grads], [size / jnp.abs(weight) for size in sizes]


def perturbed(tree: PyTree, eps: float) -> PyTree:
    """Returns the tree with each float entry multiplied by 1 + u eps, u random in (-1, 1).

    The change is the possible effect of rounding to a dtype with this eps. Integers, bools and keys are unchanged. The
    random numbers are the same in each call.
    """
    # Always the same perturbation, so that the same step has the same verdict.
    rng = np.random.default_rng(0)

    def off(x: Any) -> Any:
        if is_prng_key(x) or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        factor = 1 + eps * rng.uniform(-1, 1, np.shape(x))
        return (x * factor.astype(wide_dtype(jnp.abs(x).dtype))).astype(x.dtype)

    return jax.tree.map(off, tree)


def _other_parameters(live: list[Any], seed: int) -> list[Any]:
    """Returns the arrays ``live``, the trainable parameters, each plus normal random numbers, in the same dtypes.

    The standard deviation is half the root mean square of the array; for an array of zeros, 0.1. ``seed`` chooses the
    random numbers.
    """
    rng = np.random.default_rng(seed)

    def moved(leaf: Any) -> Any:
        x = np.asarray(leaf)  # in NumPy: JAX would compile each operation for each shape
        # Zeros hide the gradients of their factors (LoRA's second matrix), so move zeros, too.
        size = float(np.sqrt(np.mean(np.abs(x).astype(np.float32) ** 2))) if x.size else 0.0
        return (x + (0.5 * size or 0.1) * rng.normal(size=x.shape)).astype(x.dtype)

    return list(map(moved, live))


# --------------------------------------------------------------------------------------------- weights after a gather


def _spec_of_model(leaf: Sharded) -> PartitionSpec:
    names = ([axis for axis in entry_axes(entry) if axis in leaf.model_axes] for entry in leaf.names)
    return PartitionSpec(*(axes_entry(tuple(entry)) for entry in names))


def _as_gathered(leaf: Sharded, value: Any, start: Any, rounded: Any) -> Any:
    """Returns the unsharded ``value`` of a parameter as a module reads it after the gather.

    ``leaf`` is the parameter's box, which names the dtype of the gather. A leaf without gather is unchanged; a gather
    casts the value to its dtype. For an 8-bit gather ``rounded`` is the result of the gather for the value ``start``:
    returns ``rounded + value - start``, so that the gradient is that of the unrounded value. ``rounded`` is None
    without an 8-bit gather.
    """
    if rounded is not None:
        # Value of the rounded weight, gradient of the unrounded weight: as in the gather.
        return rounded + (value - lax.stop_gradient(start))
    return value.astype(leaf.communication.dtypes(leaf.value)[0]) if leaf.gathered_axes else value


def _arrived(leaf: Sharded, mesh: Mesh) -> Any:
    """Returns the unsharded value of a leaf of an extra tree (a step's further parameters), as modules read it.

    The value has the dtype and the rounding of the gather on ``mesh``. A frozen leaf is neither cast nor rounded.
    """
    value = true_value(leaf)
    return _as_gathered(leaf, value, value, _rounded_on_mesh(leaf, mesh)) if leaf.trainable else value


def _rounded_on_mesh(leaf: Sharded, mesh: Mesh) -> Any:
    """Returns the unsharded value of a leaf after its 8-bit gather on the mesh; None without an 8-bit gather.

    The rounding depends on the shards, so the gather runs as in the step. The result stays split over the model's axes.
    """
    over = leaf.gathered_axes
    if not over or leaf.communication.format_of(leaf.value) is None:
        return None
    specs = trees.partition_specs(leaf, mesh), _spec_of_model(leaf)
    gather = partial(jax.shard_map, mesh=mesh, in_specs=specs[:1], out_specs=specs[1], check_vma=False)
    return jax.jit(gather(lambda leaf: trees.stored_values(gather_params(leaf, over))))(leaf)
