"""A training script of NNX, sharded by two calls: ``create_nnx_module`` and ``nnx_value_and_grad``.

  net = Net(nnx.Rngs(0))                           net = create_nnx_module(Net, 0)
  loss, grads = nnx.value_and_grad(f)(net, x)      loss, grads = nnx_value_and_grad(f)(net, x)
  optimizer.update(net, grads)                     unchanged

``f(net, x)`` runs in a ``shard_map``: each device calls the module with its rows of ``x``. The results are the mean of
the loss, and the gradients of this mean, boxed and split as the parameters. Everything else of the script runs on
global arrays: ``nnx.Optimizer``, ``nnx.jit``, evaluation.

As in NNX, variables that the module changes while it runs are changed after the call, too: running statistics, counts
of random numbers, kernels that ``nnx.WeightNorm`` normalises. Devices share them, so a variable that would differ from
device to device is refused. The module stores its mesh in the metadata of its variables, and no other argument names
the mesh again.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.extension import change_modules
from xlstm_jax.distributed.data_parallel.modules.nnx_model import NnxModel, nnx_model
from xlstm_jax.distributed.data_parallel.modules.nnx_module import boxed_leaf, is_variable, let_carries_vary
from xlstm_jax.distributed.data_parallel.modules.shard_modules import shard_modules
from xlstm_jax.distributed.data_parallel.trees import carry_axes
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key, value_dtype, wide_dtype
from xlstm_jax.distributed.device_mesh import create_fsdp_mesh
from xlstm_jax.distributed.device_mesh.batch_layout import auto_mesh, mesh_axes, num_shards
from xlstm_jax.distributed.metrics.cells import Cell
from xlstm_jax.distributed.training.auxiliary import Auxiliary
from xlstm_jax.distributed.training.batch_axes import default_batch_axes
from xlstm_jax.distributed.training.collections import updated_collections
from xlstm_jax.distributed.training.gradients import Loss, LossFunction, fold_rng_over_axis, traced_call, value_and_grad
from xlstm_jax.distributed.training.moments import Averaged, Results, run_checks
from xlstm_jax.distributed.training.state import init_sharded
from xlstm_jax.explicit_axes import on_auto_axes, typed_like
from xlstm_jax.formatting import format_axes, listed

MESH = "mesh_of_module"  # metadata of each variable of a module that ``create_nnx_module`` made
WHOLE = PartitionSpec()
OF_LEGACY_KEY = (2,)  # shape of a key of jax.random.PRNGKey, of dtype uint32


def create_nnx_module(
    make: NnxModel | Callable[[nnx.Rngs], nnx.Module],
    rng: PyTree,
    *inputs: PyTree,
    mesh: Mesh | None = None,
    batch_axes: AxisNames | None = None,
    **kwargs: Any,
) -> Any:
    """Makes an NNX module whose parameters are split over a mesh; every device computes only the shards that it stores.

    >>> from flax import nnx
    >>> net = create_nnx_module(lambda rngs: nnx.Linear(256, 512, rngs=rngs), 0, mesh=mesh)
    >>> net.kernel.get_raw_value().addressable_shards[0].data.shape  # the mesh has 4 devices along "fsdp"
    (256, 128)
    >>> net(jnp.ones((8, 256))).shape
    (8, 512)

    The values are those of ``make(nnx.Rngs(rng))``. The module runs on global arrays as any NNX module does, also in
    ``nnx.jit`` and under ``nnx.Optimizer``; ``nnx_value_and_grad`` runs it on each device's rows.

    Args:
      make: makes the module from ``nnx.Rngs``, as its class; the default rule of ``shard_modules`` then chooses the
        modules that gather. Or an NNX model for which ``shard_modules`` has chosen the modules.
      rng: a seed, a key, or a dict of keys by stream: for the values, and for draws of the module, as of dropout.
      *inputs: example inputs of global shapes, for a model that scans over layers: a trace of the model shows which
        dims are layers.
      mesh: the mesh. None: the mesh that ``jax.set_mesh`` has set, or ``create_fsdp_mesh()``.
      batch_axes: the axes over which the inputs are split; see ``init_sharded``.
      **kwargs: passed to the call of the module on ``inputs``.
    Raises:
      TypeError: ``make`` is a module, or no function.
      ValueError: as ``init_sharded``; or a parameter is stored with padding.
    """
    if mesh is None:
        around = jax.sharding.get_mesh()
        mesh = create_fsdp_mesh() if around.empty else around
    key = jax.random.key(rng) if isinstance(rng, int) else rng
    model = make if isinstance(make, NnxModel) else shard_modules(nnx_model(make))
    module = model.bind(init_sharded(model, mesh, key, *inputs, batch_axes=batch_axes, **kwargs), key)
    for _, variable in _variables(module):
        variable.set_metadata(MESH, auto_mesh(mesh))
    return module


def nnx_value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    weighted: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axes: AxisNames | None = None,
    check_vma: bool = True,
) -> Callable[..., tuple[Any, PyTree]]:
    """Returns ``nnx.value_and_grad`` of the mean of a loss over devices, for a module whose parameters are split.

    >>> from flax import nnx
    >>> net = create_nnx_module(lambda rngs: nnx.Linear(256, 512, rngs=rngs), 0, mesh=mesh)
    >>> optimizer = nnx.Optimizer(net, optax.adamw(1e-3), wrt=nnx.Param)
    >>> @nnx.jit
    ... def step(net, optimizer, x):
    ...     loss, grads = nnx_value_and_grad(lambda net, x: jnp.mean(net(x) ** 2))(net, x)
    ...     optimizer.update(net, grads)
    ...     return loss
    >>> step(net, optimizer, jnp.ones((16, 256))) > step(net, optimizer, jnp.ones((16, 256)))
    Array(True, dtype=bool)

    Args:
      loss_fn: ``loss_fn(module, *args)`` -> the mean over the rows of this device, a real scalar; with ``has_aux`` a
        pair of the loss and any tree. ``args`` are trees of arrays, split along dim 0, scalars, which are passed on
        unchanged, and further NNX objects, as a teacher. Keys differ by device: a key of ``jax.random.key``, and those
        of an ``nnx.Rngs``.
      wrt: filter of the variables that are differentiated, as for ``nnx.Optimizer``: ``nnx.LoRAParam``.
      has_aux: see ``loss_fn``. Floats of the auxiliary output are averaged over devices, by weight if ``weighted``; of
        ``metrics.cells`` the values are merged, as counts by ``Count.of``; an array with a row for each example is
        returned with all rows.
      weighted: ``loss_fn`` returns ``(sum, weight)``; see ``value_and_grad``.
      mesh: the mesh; None: the mesh for which ``create_nnx_module`` made the module.
      batch_axes: the axes over which rows are split; None: every axis of the mesh, except the axes over which the model
        itself splits parameters.
      check_vma: see ``jax.shard_map``.
    Returns:
      A function of ``(module, *args)`` that returns ``(loss, grads)``, or ``((loss, aux), grads)``. The loss is equal
      on all devices; the gradients are an ``nnx.State``, for ``optimizer.update(module, grads)``. Values that the
      module sows are dropped; return them as auxiliary output.
    Raises:
      ValueError: the module has no mesh; ``wrt`` selects no variable; the axes do not divide the rows, or arguments
        differ in their numbers of rows; a variable that the module changes would differ from device to device; an array
        of the auxiliary output has neither rows nor a single value; or as ``value_and_grad``.
      TypeError: a number of the auxiliary output is an integer, whose mean is no count; or as ``value_and_grad``.
    """

    def value_and_grads(module: nnx.Module, /, *args: Any) -> tuple[Any, PyTree]:
        on_mesh = auto_mesh(_mesh_of(module) if mesh is None else mesh)
        is_node = tuple(isinstance(arg, nnx.Module | nnx.Rngs) for arg in args)
        nodes = (module, *(arg for arg, node in zip(args, is_node, strict=True) if node))
        batch = tuple(arg for arg, node in zip(args, is_node, strict=True) if not node)
        takes = nnx.filterlib.to_predicate(wrt)
        of_nodes: Any = nnx.split(nodes, lambda path, x: path[0] == 0 and takes(path[1:], x), ...)
        graphdef, live, rest = of_nodes
        if not nnx.to_flat_state(live):
            raise ValueError(
                f"nnx_value_and_grad: wrt={wrt!r} selects no variable of {type(module).__name__}. Pass the filter of "
                "nnx.Optimizer, as nnx.Param or nnx.LoRAParam."
            )
        params = {"live": live, "rest": rest}
        boxed = trees.map_leaves(boxed_leaf, params, one_leaf=is_variable)
        axes = default_batch_axes(boxed, on_mesh)
        axes = axes if batch_axes is None else mesh_axes(on_mesh, batch_axes, "batch_axes")
        _check_rows(batch, num_shards(on_mesh, axes), axes)
        of_params = trees.partition_specs(boxed, on_mesh)
        of_batch = jax.tree.map(lambda x: PartitionSpec(axes) if np.ndim(x) else WHOLE, batch)
        program = _Program(loss_fn, graphdef, is_node, axes, has_aux, weighted)
        run = jax.shard_map(
            program.on_device,
            mesh=on_mesh,
            in_specs=(of_params, of_batch),
            out_specs=_OfDevices(WHOLE, of_params["live"], WHOLE, PartitionSpec(axes), WHOLE),
            check_vma=check_vma,
        )

        def checked(params: PyTree, batch: PyTree) -> _OfDevices:
            results, jaxpr = traced_call(run, (params, batch))
            run_checks("results", Results(results, jaxpr, on_mesh, axes, {}))
            return results

        results = on_auto_axes(checked, on_mesh)(params, batch)
        as_typed = (WHOLE, live, WHOLE, PartitionSpec(axes), WHOLE)
        loss, grads, numbers, rows, changed = typed_like(tuple(results), as_typed)
        _write(nodes, changed)
        return (loss, program.aux_of(numbers, rows)) if has_aux else loss, grads[0]

    return value_and_grads


def _mesh_of(module: nnx.Module) -> Mesh:
    for _, variable in _variables(module):
        if (mesh := variable.get_metadata(MESH, None)) is not None:
            return mesh
    raise ValueError(
        f"nnx_value_and_grad: {type(module).__name__} was not made by create_nnx_module, and has no mesh. Make it by "
        "create_nnx_module, or pass mesh=."
    )


def _variables(node: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns a list of (path, variable) for each variable of ``node``, a module or a tuple of modules.

    A path is a tuple of attribute names and indices, as in ``nnx.to_flat_state``; in a tuple of modules the index of
    the module comes first.
    """
    return [(path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(node)) if is_variable(leaf)]


def _name(path: tuple[Any, ...]) -> str:
    """Returns a variable's path in the tuple (module, *further objects) as text, such as "dense.kernel".

    The index of the object is left out for the module, of index 0: (0, "dense", "kernel") is "dense.kernel", and
    (1, "count") is "1.count".
    """
    return ".".join(map(str, path if path[0] else path[1:]))


def _write(nodes: tuple[Any, ...], changed: Mapping[str, Any]) -> None:
    """Writes changed values into the variables of ``nodes``, the module and further NNX objects that the caller passed.

    ``changed`` maps the name of a variable (``_name``) to the new value; variables that are not listed keep their
    values.
    """
    of_paths = {_name(path): (path, variable) for path, variable in _variables(nodes)}
    new = [(path, variable.copy(changed[name])) for name, (path, variable) in of_paths.items() if name in changed]
    if new:
        nnx.update(nodes, nnx.from_flat_state(new))


def _check_rows(batch: PyTree, count: int, axes: tuple[str, ...]) -> None:
    """Raises an error unless ``count`` divides the rows of the arrays of ``batch``, and all have equally many rows.

    A key of ``jax.random.PRNGKey``, which looks like an array of two rows, has its own error.

    ``axes`` are the axes of the ``count`` devices. On a single device nothing is split, and every shape is accepted.
    """
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if np.ndim(leaf)
    ]
    arrays = [(name, np.shape(leaf)) for name, leaf in leaves]
    if count > 1 and (len({shape[0] for _, shape in arrays}) > 1 or any(shape[0] % count for _, shape in arrays)):
        for name, leaf in leaves:
            if np.shape(leaf) == OF_LEGACY_KEY and value_dtype(leaf) == np.uint32:
                raise ValueError(
                    f"nnx_value_and_grad: argument {name} after the module is uint32[2], as a key of "
                    "jax.random.PRNGKey, and would be split as two rows. Pass a key of jax.random.key, or "
                    "jax.random.wrap_key_data(key)."
                )
    for name, shape in arrays if count > 1 else ():
        if shape[0] % count:
            raise ValueError(
                f"nnx_value_and_grad: argument {name} after the module has shape {shape}, and the {count} "
                f"devices along {format_axes(axes)} do not divide its {shape[0]} rows. Pad the rows to "
                f"{-(-shape[0] // count) * count}, and give padded rows the weight 0 in the loss."
            )
        first, of_first = arrays[0]
        if shape[0] != of_first[0]:
            raise ValueError(
                f"nnx_value_and_grad: argument {name} after the module has {shape[0]} rows, of shape {shape}, but "
                f"argument {first} of shape {of_first} has {of_first[0]}, and each is split along dim 0. Pass arrays "
                "with a row for each example; let loss_fn close over any other array, which devices then have in full."
            )


class _OfDevices(NamedTuple):
    """Results of the program of all devices; names for errors."""

    loss: Any
    grads: Any
    aux: Any
    rows: Any
    changed: Any


class _Program:
    """Program of a device: the loss of its rows, the gradients, and the variables that the module changes."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        graphdef: Any,
        is_node: tuple[bool, ...],
        axes: tuple[str, ...],
        has_aux: bool,
        weighted: bool,
    ):
        self.loss_fn, self.graphdef, self.is_node, self.axes = loss_fn, graphdef, is_node, axes
        self.has_aux, self.weighted = has_aux, weighted
        # Tree of the auxiliary output; the path of each leaf that is a number, None for one that has rows.
        self.aux: tuple[Any, list[str | None]] | None = None

    def on_device(self, params: Mapping[str, PyTree], batch: tuple[PyTree, ...]) -> _OfDevices:
        """Computes loss, gradients and auxiliary output on this device; ``shard_map`` runs the function.

        ``params`` has the variables to differentiate as "live", and further variables as "rest". ``batch`` are this
        device's rows. In the result ``loss``, ``grads`` and ``aux``, a dict from the path to each number of the
        auxiliary output, are reduced over devices. ``rows`` is the list of auxiliary arrays, with a row for each of
        this device's examples.
        ``changed`` has the values of variables that the module changed, by name, equal on all devices.
        """
        trainable, frozen = params["live"], params["rest"]

        def local_loss(live: PyTree, rest: PyTree, batch: tuple[PyTree, ...]) -> tuple[Any, tuple[Any, ...]]:
            loss, aux, changed = self.called(live, rest, batch)
            return loss, (aux, changed, loss[1] if self.weighted else None)

        run = value_and_grad(local_loss, self.axes, has_aux=True, weighted=self.weighted)
        (loss, (aux, changed, weight)), grads = run(trainable, frozen, batch)
        numbers, rows = self.split_aux(aux, batch)
        if numbers.means and collectives.spread_axes(self.axes):

            def floats(live: PyTree) -> list[Any]:
                return self.split_aux(self.called(live, frozen, batch)[1], batch)[0].means

            # By weight, a mean of a device's rows becomes that of all rows; a sum is as wrong as without weights.
            equations = lambda: jax.make_jaxpr(floats)(trainable)  # noqa: E731
            run_checks("aux", Averaged(numbers.mean_paths, collectives.axis_size(self.axes), False, equations))
        if numbers.means and weight is not None:
            numbers = numbers.scaled(_share(weight, self.axes))
        found = numbers.over_devices(loss, self.axes)[1] if numbers.is_cell else {}
        return _OfDevices(loss, grads, found, rows, self.equal(changed, params, batch))

    def called(self, trainable: PyTree, frozen: PyTree, batch: tuple[PyTree, ...]) -> tuple[Any, Any, dict[str, Any]]:
        """Calls the loss function on this device's rows; returns (local loss, auxiliary output, changed variables).

        ``trainable`` and ``frozen`` are the variables of the module, from which the call makes a copy of the module.
        The loss is (sum, weight) if the loss function is weighted. The changed variables are a dict from the name of a
        variable that the call wrote to its new value; random keys are not included.
        """
        # A copy: a variable belongs to the trace in which it was made.
        nodes = nnx.merge(self.graphdef, trainable, frozen, copy=True)
        written: set[str] = set()
        before = {}
        for path, variable in _variables(nodes):
            name = _name(path)
            if isinstance(variable, nnx.RngKey):
                variable.set_value(_of_this_device(variable.get_raw_value(), self.axes))
            elif isinstance(variable, nnx.Param):
                _note_writes(variable, partial(written.add, name))
            else:
                before[name] = variable.get_raw_value()
        modules = [node for _, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Module)]
        for node in modules:
            if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
                # Statistics of all rows, as on a single device. Flax annotates one name, and takes several.
                node.axis_name = cast(Any, self.axes)
        change_modules(modules)
        boxed = trees.map_leaves(boxed_leaf, (trainable, frozen), one_leaf=is_variable)
        for node in nodes:
            # A cell makes zeros for its first carry; by type these are equal on all devices.
            let_carries_vary(node, frozenset(carry_axes((boxed, batch))))
        others, rows = iter(nodes[1:]), iter(jax.tree.map(self.drawn_here, batch))
        args = [next(others if node else rows) for node in self.is_node]
        found = LossFunction(self.loss_fn, self.weighted, self.has_aux)(nodes[0], *args)
        after = {_name(path): variable.get_raw_value() for path, variable in _variables(nodes)}
        changed = {name: after[name] for name in before if after.get(name) is not before[name]}
        changed |= {name: after[name] for name in sorted(written)}
        return (found.total, found.weight) if self.weighted else found.total, found.aux, changed

    def drawn_here(self, leaf: Any) -> Any:
        """Returns a single random key with this device's index folded in; any other leaf of the batch unchanged.

        Arrays of keys have a key for each row, and each device already has those of its rows.
        """
        return _of_this_device(leaf, self.axes) if is_prng_key(leaf) and not np.ndim(leaf) else leaf

    def equal(self, changed: dict[str, Any], params: PyTree, batch: tuple[PyTree, ...]) -> dict[str, Any]:
        """Returns ``changed``, a dict of changed variables by name, with types that say: equal on all devices.

        ``changed`` is as ``called`` returns it, ``params`` and ``batch`` as for ``on_device``. Returns {} for {}.

        Raises:
          ValueError: by the equations of the loss a value would differ between devices; or the variable is of an
            ``nnx.Metric``, which counts rows.
        """
        if not changed:
            return {}
        if collectives.spread_axes(self.axes):
            for path, variable in _variables_of(params):
                # Also refuse what is equal on all devices: a count of a device's rows.
                if isinstance(variable, nnx.metrics.MetricState) and _name(path) in changed:
                    raise ValueError(
                        f"nnx_value_and_grad: loss_fn updates an nnx.Metric, the variable '{_name(path)}', and each "
                        "device would count its rows alone. Return the values as auxiliary output (has_aux=True), with "
                        "a row for each example, and update the metric after the call."
                    )
        values = {_name(path): variable.get_raw_value() for path, variable in _variables_of(params)}
        kept = {name: values[name] for name in changed}

        def again(params: PyTree, batch: tuple[PyTree, ...], _: None, kept: Mapping[str, Any]) -> Loss:
            del kept
            loss, _, changed = self.called(params["live"], params["rest"], batch)
            return Loss(loss[0] if self.weighted else loss, collections=changed)

        args = (params, batch, None, kept)
        return updated_collections(again, args, [*kept], changed, self.axes, read_later=False)

    def split_aux(self, aux: PyTree, batch: tuple[PyTree, ...]) -> tuple[Auxiliary, list[Any]]:
        """Splits the leaves of the auxiliary output ``aux`` of this device into (numbers, arrays).

        The numbers, scalars and cells of ``metrics.cells``, are an ``Auxiliary`` of a dict from path to number. The
        arrays are a list in the order of the leaves, and have a row for each example of ``batch``. The tree is stored
        in ``self.aux``, for ``aux_of``.

        Raises:
          TypeError: a number is an integer.
          ValueError: the number of rows of an array is that of no leaf of ``batch``.
        """
        counts = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
        leaves, tree = trees.flatten_with_path(aux, Cell)
        has_rows = [not isinstance(leaf, Cell) and np.ndim(leaf) > 0 for _, leaf in leaves]
        rows = [leaf for (_, leaf), rows in zip(leaves, has_rows, strict=True) if rows]
        for leaf in rows:
            if np.shape(leaf)[0] not in counts:
                raise ValueError(
                    f"nnx_value_and_grad: has_aux=True returned an array of shape {np.shape(leaf)}, and a device has "
                    f"{listed(sorted(counts))} rows. Return scalars, which are averaged over devices, or arrays with a "
                    "row for each example."
                )
        self.aux = tree, [None if rows else path for (path, _), rows in zip(leaves, has_rows, strict=True)]
        return Auxiliary.of({path: leaf for (path, leaf), rows in zip(leaves, has_rows, strict=True) if not rows}), rows

    def aux_of(self, numbers: Mapping[str, Any], rows: list[Any]) -> PyTree:
        """Returns the auxiliary output in the tree that the loss function returned, from numbers and arrays.

        ``numbers`` maps the path of each number to its value, reduced over devices; ``rows`` are the arrays, with an
        entry for each row of the batch. Works only after ``split_aux``.
        """
        assert self.aux is not None
        (tree, paths), of_rows = self.aux, iter(rows)
        return jax.tree.unflatten(tree, [next(of_rows) if path is None else numbers[path] for path in paths])


def _share(weight: Any, axes: tuple[str, ...]) -> Any:
    """Returns ``weight`` of this device, divided by its mean over the devices along ``axes``; 0 if the mean is 0."""
    local = jnp.asarray(weight, wide_dtype(jnp.result_type(weight)))
    (mean,) = collectives.pmean([local], [axes])
    return jnp.where(mean != 0, local / jnp.where(mean != 0, mean, 1), 0)


def _note_writes(variable: Any, note: Callable[[], None]) -> None:
    """Makes ``variable`` call ``note()`` whenever its value is set; hooks that it already has run, too.

    A comparison of arrays would also find parameters that a transformation of NNX has written back unchanged.
    """
    hooks = variable.get_metadata("on_set_value", ())

    def noted(variable: Any, value: Any) -> Any:
        del variable
        note()
        return value

    variable.set_metadata(on_set_value=(*(hooks if isinstance(hooks, tuple) else (hooks,)), noted))


def _of_this_device(key: Any, axes: tuple[str, ...]) -> Any:
    """Returns ``key`` with the index of this device along ``axes`` folded in, inside ``shard_map``.

    In an array of keys the index is folded into each key. Returns ``key`` unchanged if the axes have a single device.
    """
    spread = collectives.spread_axes(axes)
    if not spread:
        return key
    fold: Callable[[Any], Any] = partial(fold_rng_over_axis, axis_name=tuple(spread))
    for _ in range(np.ndim(key) - (0 if is_prng_key(key) else 1)):
        fold = jax.vmap(fold)
    return fold(key)


def _variables_of(params: Mapping[str, PyTree]) -> list[tuple[tuple[Any, ...], Any]]:
    flat = [*nnx.to_flat_state(params["live"]), *nnx.to_flat_state(params["rest"])]
    return [(path, leaf) for path, leaf in flat if is_variable(leaf)]
