"""Comparison of a small model's sharded training on this machine with training on one device.

``doctor`` runs this file in child processes, which write their results to FILE:

  python -m xlstm_jax.cli.self_test devices FILE         the devices at hand
  python -m xlstm_jax.cli.self_test parity FILE          comparisons on these devices
  python -m xlstm_jax.cli.self_test simulated FILE       comparisons on 8 simulated CPU devices

The reference is the plain model on one device with the full batch, without any collective. The rows of the devices
differ in scale, so that no device's local gradient equals the mean. A guard leaves the mean out, and must measure a
difference.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.modules.linen_class import shard_module_params
from xlstm_jax.distributed.data_parallel.shard import sync_gradients
from xlstm_jax.distributed.data_parallel.trees import partition_specs, unbox
from xlstm_jax.distributed.device_mesh.batches import shard_batch
from xlstm_jax.distributed.device_mesh.meshes import DeviceMeshManager
from xlstm_jax.distributed.processes.devices import simulate_cpu_devices
from xlstm_jax.distributed.training.state import create_train_state
from xlstm_jax.distributed.training.step import make_train_step

MAX_DEVICES = 8
TOLERANCE = 1e-4  # fraction of a leaf's largest entry; float32 sums in another order differ by 1e-6
GUARD = 100 * TOLERANCE  # minimum difference for a missing mean
STEPS, LEARNING_RATE = 3, 1e-3
WIDTH, MIN_WEIGHT_SIZE, ROWS = 16, 32, 16


@dataclass(frozen=True)
class Check:
    """A comparison: the measured value, the allowed value, and whether the measured value is allowed."""

    name: str
    measured: str
    allowed: str
    ok: bool


class Block(nn.Module):
    """A residual MLP; its norm is too small to be split."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        h = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h), None


class SmallModel(nn.Module):
    """Two rematerialized blocks in a scan, between two layers."""

    wrap: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.wrap(nn.Dense)(WIDTH)(x)
        block = nn.remat(self.wrap(Block), prevent_cse=False)
        x, _ = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()(x, None)
        return self.wrap(nn.Dense)(WIDTH)(x)


PLAIN = SmallModel(lambda cls: cls)
SHARDED = SmallModel(functools.partial(shard_module_params, axis_name="fsdp", min_weight_size=MIN_WEIGHT_SIZE))


def loss_fn(params: PyTree, apply_fn: Callable[..., Any], batch: dict[str, Any], rng: Any = None) -> jax.Array:
    """Returns the mean squared error of the model, a scalar: outputs for ``batch["x"]`` against ``batch["y"]``.

    ``rng`` is not used.
    """
    del rng
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)


def example_batch() -> dict[str, np.ndarray]:
    """Returns {"x": ..., "y": ...}, NumPy arrays of float32 [16, 16]; the same random numbers in each call.

    The rows of x grow in scale, so that each device has rows of another scale.
    """
    random = np.random.default_rng(0)
    # With equal scales each local gradient would be near the mean, and a missing mean would look like rounding.
    x, y = (random.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(2))
    return {"x": x * np.linspace(0.2, 2, ROWS, dtype=np.float32)[:, None], "y": y}


def optimizer() -> optax.GradientTransformation:
    """Returns AdamW, chained after a transform that stores the last gradients: ``opt_state[0]``."""
    # `make_train_step` returns no gradients, so the optimizer's state stores its input.
    seen = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (updates, updates)
    )
    return optax.chain(seen, optax.adamw(LEARNING_RATE))


def difference(got: PyTree, want: PyTree) -> float:
    """Returns the largest difference of two trees, relative to the largest entry of the same leaf in ``want``.

    The difference of a leaf is the largest absolute difference of its entries. For a leaf of rounding errors (at most
    1e-6 of the largest entry of all of ``want``) the difference is relative to that largest entry. NaN or infinite if
    all of ``want`` is 0.
    """
    got, want = (list(map(np.asarray, jax.tree.leaves(tree))) for tree in (got, want))
    largest = np.array([np.abs(leaf).max() for leaf in want])
    # A leaf's gradient may be mathematically zero. Its entries are then rounding errors and define no scale.
    scale = np.where(largest > 1e-6 * largest.max(), largest, largest.max())
    off = np.array([np.abs(g - w).max() for g, w in zip(got, want, strict=True)])
    return float((off / scale).max())


def within(name: str, got: PyTree, want: PyTree) -> Check:
    """Returns the ``Check`` called ``name`` that two trees are equal up to rounding; a NaN fails.

    Each leaf of ``got`` may differ by at most 1e-4 of the largest entry of the leaf in ``want``; a leaf of rounding
    errors alone by 1e-4 of the largest entry of all of ``want``.
    """
    distance = difference(got, want)
    return Check(name, f"{distance:.1e}", f"at most {TOLERANCE:.0e}", distance <= TOLERANCE)


def reference(batch: dict[str, np.ndarray]) -> tuple[PyTree, PyTree, PyTree]:
    """Trains the plain model on one device without collectives; returns (initial, first gradients, last).

    ``initial`` and ``last`` are the parameters before the first and after the last of ``STEPS`` steps on the same
    batch; trees of NumPy arrays.
    """
    tx = optimizer()
    first = params = jax.jit(PLAIN.init)(jax.random.key(0), batch["x"])["params"]
    opt_state = tx.init(params)

    @jax.jit
    def step(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        grads = jax.grad(loss_fn)(params, PLAIN.apply, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, grads

    params, opt_state, grads = step(params, opt_state)
    for _ in range(STEPS - 1):
        params, opt_state, _ = step(params, opt_state)
    return jax.device_get((first, grads, params))


def parity(mesh: Mesh) -> list[Check]:
    """Trains on the mesh and on one device, and returns a ``Check`` for each comparison of parameters or gradients.

    The mesh needs an axis "fsdp"; every axis splits the batch. The last ``Check`` tests the comparison itself:
    gradients without the mean over devices must differ from the right gradients.
    """
    with jax.default_matmul_precision("highest"):  # accelerators round the inputs of matrix products by default
        batch, axes = example_batch(), tuple(mesh.axis_names)
        first, grads, last = reference(batch)
        sharded_batch = shard_batch(batch, mesh, axes)
        state = create_train_state(SHARDED, optimizer(), mesh, jax.random.key(0), batch["x"], batch_axes=axes)
        # Copies, here and below: the train step donates the state's buffers.
        params = jax.tree.map(jnp.copy, state.params)
        checks = [within("initial values", unbox(params), first)]
        for check_vma in (True, False):
            setting = f"check_vma={check_vma}"
            by_hand_grads, missed = by_hand(params, sharded_batch, mesh, check_vma=check_vma)
            checks.append(within(f"jax.grad and sync_gradients, {setting}", by_hand_grads, grads))
            got_grads, got_last = trained(jax.tree.map(jnp.copy, state), sharded_batch, mesh, check_vma=check_vma)
            checks.append(within(f"make_train_step, gradients, {setting}", got_grads, grads))
            checks.append(within(f"make_train_step, {STEPS} steps of AdamW, {setting}", got_last, last))
        off = difference(missed, grads)
    guard = Check("without sync_gradients it would be seen", f"{off:.1e}", f"at least {GUARD:.0e}", off >= GUARD)
    return [*checks, guard]


def by_hand(params: PyTree, batch: PyTree, mesh: Mesh, *, check_vma: bool) -> tuple[PyTree, PyTree]:
    """Returns the gradients of a step on the mesh: (averaged by ``sync_gradients``, as ``jax.grad`` returns them).

    The step is ``jax.grad`` of ``loss_fn`` in a ``shard_map``, without ``make_train_step``; the batch is split over
    every axis. Both results are trees of unsharded NumPy arrays. In the second, the gradient of a replicated leaf is
    local to a device, not the mean. The second is None for ``check_vma=True``.
    """
    # With check_vma=True JAX sums the gradients of replicated leaves, so a missing mean would not show.
    axes, specs = tuple(mesh.axis_names), partition_specs(params, mesh)

    def per_device(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        grads = jax.grad(loss_fn)(params, SHARDED.apply, batch)
        return sync_gradients(grads, axes), None if check_vma else grads

    in_specs, out_specs = (specs, PartitionSpec(axes)), (specs, None if check_vma else specs)
    step = jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.device_get(unbox(jax.jit(step)(params, batch)))


def trained(state: TrainState, batch: PyTree, mesh: Mesh, *, check_vma: bool) -> tuple[PyTree, PyTree]:
    """Returns (gradients of the first step, parameters after ``STEPS`` steps) of ``make_train_step`` on the same batch.

    Both are unsharded NumPy arrays. The step donates the buffers of ``state``, which cannot be used again.
    """
    rng = jax.random.key(0)
    step = make_train_step(loss_fn, mesh, tuple(mesh.axis_names), check_vma=check_vma)
    state, _ = step(state, batch, rng)
    opt_state: PyTree = state.opt_state
    grads = jax.device_get(opt_state[0])
    for _ in range(STEPS - 1):
        state, _ = step(state, batch, rng)
    return grads, jax.device_get(unbox(state.params))


def largest_mesh() -> Mesh:
    """Returns a mesh of the first n local devices: {"dp": 2, "fsdp": n / 2}, or {"fsdp": n} for n below 4.

    n is the largest power of two up to the number of devices, at most ``MAX_DEVICES``.
    """
    # A power of two divides the rows of the batch and the widths of the model.
    devices = jax.local_devices()
    count = 2 ** (min(len(devices), MAX_DEVICES).bit_length() - 1)
    shape = {"dp": 2, "fsdp": count // 2} if count >= 4 else {"fsdp": count}
    return DeviceMeshManager.create_device_mesh(shape, devices=devices[:count])


def main(test: str, path: str) -> None:
    """Writes a report on the devices at hand to the file ``path``, as JSON: platform, kinds of devices, and checks.

    Args:
      test: "devices": without checks; "parity": with the checks of ``parity`` on the devices at hand; "simulated": the
        same on 8 simulated CPU devices.
      path: the file, which is overwritten.
    """
    if test == "simulated":
        simulate_cpu_devices(MAX_DEVICES)
    devices = jax.local_devices()
    report: dict[str, Any] = {"platform": devices[0].platform, "kinds": [device.device_kind for device in devices]}
    if test != "devices":
        mesh = largest_mesh()
        report |= {"mesh": dict(mesh.shape), "checks": [dataclasses.asdict(check) for check in parity(mesh)]}
    Path(path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
