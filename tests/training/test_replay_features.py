"""Replays of steps with other features: a flipped bit is found and its device named, and nothing else is an alarm."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.flipped_bits import ALWAYS, ONCE_FIRST, ONCE_SECOND, SITES, Faults, FaultyDense
from tests.support import bits_equal, fsdp, normal
from xlstm_jax.distributed import (
    DeviceMeshManager,
    ReplayError,
    Replicas,
    create_train_state,
    make_train_step,
    replayed,
    scan_layers,
)
from xlstm_jax.distributed.model_parallel import ColumnDense, RowDense, context_attention, context_positions
from xlstm_jax.distributed.model_parallel.experts import Experts
from xlstm_jax.distributed.training import moments
from xlstm_jax.distributed.training.equal_results import check_equal_results

WIDTH, KEY = 16, jax.random.key(3)
ROWS = normal(1, (32, 8))
SEQUENCES = normal(1, (8, 16, 8))
FAULTS = Faults()


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, *_):
        return x + FaultyDense(WIDTH, FAULTS)(nn.LayerNorm()(x)), None


class Layers(nn.Module):
    """Three layers of a scan, or of a scan that gathers ahead."""

    wrap: Any
    prefetch: bool = False

    @nn.compact
    def __call__(self, x):
        x = self.wrap(nn.Dense)(WIDTH)(x)
        x, _ = scan_layers(self.wrap(Layer), 3, prefetch=self.prefetch)(name="layers")(x)
        return self.wrap(nn.Dense)(4)(x)


class Mixture(nn.Module):
    batch_axes: Any = None

    @nn.compact
    def __call__(self, x):
        x = fsdp(nn.Dense)(WIDTH)(x)
        return Experts(FaultyDense(WIDTH, FAULTS), 8, 2, block_size=4, batch_axes=self.batch_axes)(x)


class Attention(nn.Module):
    impl: str

    @nn.compact
    def __call__(self, x):
        x = fsdp(FaultyDense)(WIDTH, FAULTS)(x)
        query, key, value = (fsdp(nn.DenseGeneral)((8, 2), name=name)(x) for name in ("query", "key", "value"))
        turned = jnp.cos(context_positions(x.shape[1], "cp") / 3.0)[:, None, None]
        y = context_attention(FAULTS.activation(query * turned), key * turned, value, impl=self.impl)
        return fsdp(nn.DenseGeneral)(8, axis=(-2, -1), name="out")(y)


class SplitLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = fsdp(FaultyDense)(WIDTH, FAULTS)(x)
        h = FAULTS.activation(nn.gelu(fsdp(ColumnDense)(32, name="up")(x)))
        return x + fsdp(RowDense)(WIDTH, name="down")(h)


def loss(params, apply_fn, x, rng):
    return jnp.mean(apply_fn({"params": params}, x + 0.1 * jax.random.normal(rng, x.shape)) ** 2)


HYBRID = {"dp": 2, "fsdp": 4}
STAGED = partial(fsdp, axis_name=("dp", "fsdp"))
OF_SEQUENCES = {"batch_spec": P("fsdp", "cp")}
# Model, mesh, axes of the batch, batch, options of the step.
CASES = {
    "gathers ahead": (Layers(STAGED, True), HYBRID, ("dp", "fsdp"), ROWS, {"num_minibatches": 2}),
    "copies": (Layers(fsdp(replicas=Replicas("dp"))), {"dp": 4, "fsdp": 2}, ("dp", "fsdp"), ROWS, {}),
    "copies in 8 bits": (Layers(fsdp(replicas=Replicas("dp", "int8"))), HYBRID, ("dp", "fsdp"), ROWS, {}),
    "copies, reduced once": (
        Layers(fsdp(replicas=Replicas("dp", shard_optimizer_state=True))),
        HYBRID,
        ("dp", "fsdp"),
        ROWS,
        {"num_minibatches": 2, "accumulation": "reduce_replicas_once"},
    ),
    "experts on an axis of the batch": (Mixture(), {"fsdp": 2, "ep": 4}, ("fsdp", "ep"), ROWS, {}),
    "experts on another axis": (Mixture(("fsdp",)), {"fsdp": 4, "ep": 2}, ("fsdp",), ROWS, {}),
    "ring": (Attention("ring"), {"fsdp": 2, "cp": 4}, ("fsdp", "cp"), SEQUENCES, OF_SEQUENCES | {"layout": "zigzag"}),
    "ulysses": (Attention("ulysses"), {"fsdp": 2, "cp": 4}, ("fsdp", "cp"), SEQUENCES, OF_SEQUENCES),
    "tensor parallel": (SplitLayers(), {"fsdp": 2, "tp": 4}, ("fsdp",), ROWS, {}),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_a_flipped_bit_is_found_and_its_device_named(case, monkeypatch):
    model, sizes, axes, x, options = CASES[case]
    # The callback of a fault takes the place of its device, so that all results seem to differ by device.
    rest = [check for check in moments.CHECKS if check.run_check is not check_equal_results]
    assert len(rest) == len(moments.CHECKS) - 1
    monkeypatch.setattr(moments, "CHECKS", rest)
    mesh = DeviceMeshManager.create_device_mesh(sizes)
    FAULTS.none()
    state = create_train_state(model, optax.sgd(1e-2), mesh, KEY, x, batch_axes=axes, allow_replicated=True)
    how = options if "batch_spec" in options else options | {"batch_axes": axes}
    step = replayed(make_train_step(loss, mesh, check_vma=False, allow_replicated=True, **how), every=1)
    FAULTS.watch(step)
    clean = step(jax.tree.map(jnp.copy, state), x, KEY)
    rng, found, alone = np.random.default_rng(0), 0, 0
    trials = [(when, site) for when in (ONCE_FIRST, ONCE_SECOND, ALWAYS) for site in SITES]
    for when, site in trials:
        device = int(rng.integers(8))
        FAULTS.set(when, device, site, int(rng.integers(1024)), int(rng.integers(16, 31)))
        given = jax.tree.map(jnp.copy, state)
        try:
            after = step(given, x, KEY)
        except ReplayError as error:
            named = [suspect.id for suspect in error.devices]
            assert device in named, (when, site)
            found += 1
            alone += named == [device]
        else:  # the bit had no effect, as in a row of an expert that holds no token
            assert bits_equal(after, clean), (when, site)
    assert found >= len(trials) - 2 and alone >= found - 2
    FAULTS.none()
    for number in range(4):  # no alarm
        before = step.replays
        state, _ = step(state, x + number, KEY)
        assert step.replays == before + 1
