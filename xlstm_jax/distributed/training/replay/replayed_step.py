"""``replayed``: every k-th call of a step computes gradients twice, on different devices, and compares the bits.

The rows, shards and key of each device move to the neighbour along a batch axis: the second run is the same program on
the same mesh with its devices rolled by one place. So the program needs no code for the replay, and everything that
depends on a place of the mesh (key, experts, tokens) is computed again in the same way by another device.

  run            on the mesh             loss, gradients, digests of the values that each device sends
  run again      on the rolled mesh      digests
  compare        on the hosts            every process reads the digests of all devices, and decides alike
  update         on the mesh             the optimizer, only if all digests are equal

The two runs are separate executions, so that XLA cannot merge the computations. The state is not donated before the
update.

If digests of a place differ, both runs are repeated, to name the device and to notice a program that is not
deterministic:

  the first run differs from its repetition     the device of the first run was wrong once
  the second run differs from its repetition    the device of the second run was wrong once
  neither run differs                           a device is always wrong: the device that computed in two such places
  both runs differ, in most places              the program is not deterministic bit for bit: no alarm, no more replays
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.distributed.processes.devices import Device
from xlstm_jax.distributed.resilience.disagreement import DisagreementError, named_devices
from xlstm_jax.distributed.training.arguments import ExtraTrees
from xlstm_jax.distributed.training.batch_axes import StepOfState
from xlstm_jax.distributed.training.carries.carry import BatchResult
from xlstm_jax.distributed.training.moments import CheckedStep
from xlstm_jax.distributed.training.replay.watched_sends import watched
from xlstm_jax.distributed.training.step import StepOptions, TrainStep
from xlstm_jax.explicit_axes import outside_set_mesh
from xlstm_jax.introspection import warn_user

DEFAULT_EVERY = 100


class ReplayError(DisagreementError):
    """Error: a device computed other bits than its neighbour from the same numbers; the update was not applied.

    The state passed to the step is unchanged and not donated: continue the training with this state, or save it.

    >>> issubclass(ReplayError, DisagreementError)
    True
    """


def replayed(step: TrainStep, every: int = DEFAULT_EVERY) -> "ReplayedStep":
    """Returns the step with a replay in every ``every``-th call, which finds devices that compute wrong numbers.

    A replay computes loss and gradients twice: first each device does its own work, then each device does the work of a
    neighbour. Before the optimizer's update, the replay compares the bits of all values that devices send to each other
    (cotangents of weights before their reduction, the loss). On a mesh of a single device both runs are on this device,
    so a replay finds only errors that do not repeat.

    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))
    >>> loss_fn = lambda params, apply_fn, batch, rng: jnp.mean(apply_fn({"params": params}, batch) ** 2)
    >>> step = replayed(make_train_step(loss_fn, mesh, ("dp", "fsdp")), every=2)
    >>> for _ in range(4):
    ...     state, metrics = step(state, x, jax.random.key(1))
    >>> step.replays, int(state.step)
    (2, 4)

    Args:
      step: a step of ``make_train_step``, on a mesh of devices.
      every: number of calls per replay. Every process must make the same calls.
    Returns:
      The step with replays, with the arguments, results and methods (``lower``, ``trace``) of ``step``. A call with a
      replay waits for the devices.
    Raises:
      TypeError: ``step`` is not a step of ``make_train_step``.
      ValueError: ``every`` is not positive, or the mesh is abstract.
      ReplayError: at the call, in every process: devices disagree. The error names devices, processes and leaves. The
        state is unchanged and not donated.

    Warns:
      UserWarning: repeated runs of the program differ in bits on this backend; no further call is replayed.
    """
    # A step without batch_axes is made at its first call. A step over all axes has the same options, except batch_axes.
    made = step.of_state(None) if isinstance(step, StepOfState) else step
    options = getattr(inspect.unwrap(made), "__self__", None)
    if not isinstance(step, CheckedStep | StepOfState) or not isinstance(options, StepOptions):
        raise TypeError(f"replayed takes a step of make_train_step, not {step!r}. Pass what make_train_step returned.")
    if every < 1:
        raise ValueError(f"{every=}: a replay in every how many calls, 1 or more.")
    mesh = options.layout.mesh
    if not isinstance(mesh, Mesh):
        raise ValueError("replayed: the mesh of the step is abstract, and a replay moves work between devices.")
    return ReplayedStep(step, mesh, every)


class ReplayedStep:
    """A step that replays every k-th call; see ``replayed``.

    ``replays`` counts the replays so far.
    """

    def __init__(self, step: CheckedStep | StepOfState, mesh: Mesh, every: int) -> None:
        functools.update_wrapper(self, step)
        self._step, self._mesh, self._every = step, mesh, every
        self._calls = self.replays = 0
        self._repeats = True  # False after repeated runs of the program have differed in bits

    @functools.cached_property
    def _options(self) -> StepOptions:
        return inspect.unwrap(self._step).__self__

    @functools.cached_property
    def runs(self) -> "list[Run]":
        """The programs of the two runs of a replay: first on the mesh of the step, then on the rolled mesh.

        On the rolled mesh each device's work runs on a neighbour. If the step was made without ``batch_axes``, the
        programs exist only after its first call.
        """
        options, compiler_options = self._options, self._step.options["compiler_options"]
        rolled = rolled_mesh(self._mesh, options.layout.axes)
        on_rolled = replace(options, layout=replace(options.layout, mesh=rolled))
        return [Run(options, self._mesh, compiler_options), Run(on_rolled, rolled, compiler_options)]

    @functools.cached_property
    def _update(self) -> Callable[..., tuple[Any, ...]]:
        return jax.jit(
            functools.partial(_update, self._options),
            donate_argnums=(0, 1),
            compiler_options=self._step.options["compiler_options"],
        )

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self._calls += 1
        if self._calls % self._every or not self._repeats:
            return self._step(*args, **kwargs)
        # eval_shape runs the checks that a trace of the step makes (traced once), checked_call the checks of each call.
        self._step.eval_shape(*args, **kwargs)
        return self._step.checked_call(outside_set_mesh(self._replay), *args, **kwargs)

    def _replay(
        self,
        state: Any,
        batch: PyTree,
        rng: jax.Array | None = None,
        local: PyTree = None,
        *,
        extra_trees: ExtraTrees = None,
    ) -> tuple[Any, ...]:
        args = (batch, rng, local, extra_trees or {})
        result = self._compared(state.replace(opt_state=()), *args)
        self.replays += 1
        return self._update(state, result, *args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._step, name)

    def _compared(self, *args: PyTree) -> BatchResult:
        """Computes loss and gradients on the mesh, and again on the rolled mesh; returns the result of the first run.

        ``args`` are (state without optimizer state, batch, rng, local, extra_trees). If the digests of the runs differ,
        both runs are repeated. If the program then does not repeat its own bits on most devices, a warning is given,
        the result is returned, and no further call is replayed.

        Raises:
          ReplayError: the digests of the two runs differ, and the program repeats its bits on most devices.
        """
        result, first = self.runs[0](*args)
        _, second = self.runs[1](*args)
        if np.array_equal(first, second):
            return result
        again = [run(*args)[1] for run in self.runs]
        changed = [_differ(first, again[0]), _differ(second, again[1])]
        if 2 * np.sum(changed[0] & changed[1]) > len(first):
            self._repeats = False
            warn_user(
                f"replayed: on {first.shape[0]} devices two runs of one program from the same numbers differ in bits "
                f"each time ({jax.default_backend()}); this backend does not repeat this program, and no further call "
                "is replayed. See docs/howto/wrong_numbers.md.",
            )
            return result
        raise self._report(first != second, changed)

    def _report(self, differs: np.ndarray, changed: Sequence[np.ndarray]) -> ReplayError:
        """Returns the ``ReplayError`` for runs with different digests; it names the suspected devices and the leaves.

        Args:
          differs: bool [device, send, 2], where the digests of the two runs differ; at least one entry is True. A send
            is a collective, or a result of the program; its digest is two words. Devices are places in the mesh.
          changed: for each of the two runs bool [device], where the run differs from its repetition.
        """
        differs = differs.any(-1)
        sends = np.flatnonzero(differs.any(0))
        # The first wrong send was computed on the faulty device; later sends may depend on wrong received values.
        places = np.flatnonzero(differs[:, sends[0]])
        devices = [np.ravel(run.mesh.devices) for run in self.runs]
        suspects = []
        for place in places:
            of_place = [devices[run][place] for run in (0, 1)]
            once = [run for run in (0, 1) if changed[run][place]]
            suspects.append({of_place[once[0]]} if len(once) == 1 else set(of_place))
        faulty: set[Device] = set.intersection(*suspects) or set.union(*suspects)
        leaves = list(dict.fromkeys(path for send in sends for path in self.runs[0].leaves[send]))
        ordered = sorted(faulty, key=lambda device: device.id)
        return ReplayError(
            f"replay in call {self._calls}: of {len(differs)} devices, device {named_devices(ordered)} computed other "
            f"bits than its neighbour from the same numbers, of {len(leaves)} leaves",
            ordered,
            {path: f"'{path}'" for path in leaves},
            "The update was not taken, and the state is unchanged. Take the device out of the job: "
            "docs/howto/wrong_numbers.md.",
        )


class Run:
    """Computes loss, gradients and digests of a step on ``mesh``, the mesh of ``options``.

    ``leaves`` has a list of paths for each send, after the run was traced.
    """

    def __init__(self, options: StepOptions, mesh: Mesh, compiler_options: Any) -> None:
        self._options, self.mesh = options, mesh
        self.leaves: list[list[str]] = []
        self.jitted = jax.jit(self._of_batch, compiler_options=compiler_options)

    def __call__(self, *args: PyTree) -> tuple[BatchResult, np.ndarray]:
        """Runs the program; returns the ``BatchResult`` (loss, gradients, ...) and the digests of all values sent.

        The digests are a NumPy array, uint32 [device, send, 2]: a send is a collective, or a result that no collective
        sends, and its digest is two words. ``args`` are (state, batch, rng, local, extra_trees), on the mesh of the
        step. Waits for the devices.
        """
        result, digests = self.jitted(*self.on_this_mesh(args))
        return result, np.asarray(digests)

    def on_this_mesh(self, args: PyTree) -> PyTree:
        """Returns ``args`` with each array moved to the mesh of this run; values and specs stay the same.

        The shard of the device at a place of the old mesh moves to the device at this place of the mesh of the run.
        Arrays that are on no mesh, or on this mesh already, are returned unchanged.
        """
        return jax.tree.map(functools.partial(_moved, mesh=self.mesh), args)

    def _of_batch(
        self, state: Any, batch: PyTree, rng: jax.Array, local: PyTree, extra_trees: PyTree
    ) -> tuple[BatchResult, jax.Array]:
        options = self._options.of_state(state, rng)
        program = options.program(state, batch, rng, local, extra_trees)
        program = watched(program, self.mesh.axis_names, functools.partial(setattr, self, "leaves"))
        return jax.shard_map(program.fn, **program.options)(*program.args)


def _update(
    options: StepOptions,
    state: Any,
    result: BatchResult,
    batch: PyTree,
    rng: jax.Array,
    local: PyTree,
    extra_trees: PyTree,
) -> tuple[Any, ...]:
    """Returns the results of the step, (new state, metrics, ...), from ``result``, the loss and gradients of a run.

    ``options`` are those of the step, and ``state`` the state before the update. The further arguments are those of the
    step; with them an optimizer can compute gradients at other parameters.
    """
    options = options.of_state(state, rng)
    program = options.program(state, batch, rng, local, extra_trees)
    on_mesh = jax.shard_map(program.fn, **program.options)
    return options.updated(state, result, lambda params: on_mesh(params, *program.args[1:]))


def rolled_mesh(mesh: Mesh, axes: Sequence[str]) -> Mesh:
    """Returns the mesh with its devices rolled by one place: along the largest of ``axes``, or over all devices.

    Each place gets the device of the place before. A roll along a single axis keeps a ring of links a ring. On an axis
    of two devices both places would have the same pair of devices, so that a device that is always wrong could not be
    distinguished from its neighbour; the roll is then over all devices.
    """
    largest = max(axes, key=lambda axis: mesh.shape[axis])
    along = mesh.axis_names.index(largest) if mesh.shape[largest] > 2 else None
    return Mesh(np.roll(mesh.devices, 1, along), mesh.axis_names, axis_types=mesh.axis_types)


def _moved(x: Any, mesh: Mesh) -> Any:
    # Arrays on a host, or on a device without a mesh (such as a new key), are placed by the program.
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding) or x.sharding.mesh == mesh:
        return x
    if is_prng_key(x):
        return jax.random.wrap_key_data(_moved(jax.random.key_data(x), mesh), impl=jax.random.key_impl(x))
    kind = x.sharding.memory_kind
    sharding = NamedSharding(mesh, x.sharding.spec, memory_kind=kind)
    local_shards = {_key(shard.index): shard.data for shard in x.addressable_shards}
    expected_indices = sharding.addressable_devices_indices_map(x.shape)
    if not local_shards.keys() >= set(map(_key, expected_indices.values())):
        return jax.device_put(x, sharding)  # from another process; JAX compiles a program for each shape
    shards = [
        jax.device_put(local_shards[_key(index)], SingleDeviceSharding(device, memory_kind=kind))
        for device, index in expected_indices.items()
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def _key(index: Any) -> tuple[tuple[int | None, int | None], ...]:
    """Returns the index of a shard, a tuple of slices, as a hashable value: ((start, stop), ...)."""
    return tuple((part.start, part.stop) for part in index)


def _differ(digests: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns bool [device]: whether any digest of the device differs between two runs of a program.

    ``digests`` and ``others`` are the digests of the two runs, [device, send, 2]: two words for each value sent.
    """
    return np.any(digests != others, axis=(1, 2))
