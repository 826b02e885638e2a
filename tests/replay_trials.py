"""Faults of many kinds in replayed steps: ``python -m tests.replay_trials [--trials 24] [--seed 0] [--models ...]``.

Prints for each model how many faults were found, how many had no effect on the step, and which were missed or named
another device. A fault is drawn by kind, site, device, and whether it is there once or always. The kinds are other ones
than the flipped bits of ``tests/training/test_replay.py``:

  stuck     a bit of all entries is 1, or 0           scaled   all entries are too large, by 2^-k
  entry     one entry is 0, NaN or infinite           rows     two rows are exchanged

and they are in activations, gathered weights, cotangents, gradients of a layer's weights, dropout masks, what the
model's own collective is given and returns, statistics that only go into collections, and values that only go into
metrics.
"""

import argparse
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from tests.flipped_bits import ALWAYS, ONCE_FIRST, ONCE_SECOND, RUNS, Faults, make_site
from xlstm_jax.distributed import (
    DeviceMeshManager,
    ReplayError,
    create_train_state,
    make_train_step,
    nnx_model,
    replayed,
    shard_module_params,
    shard_modules,
    simulate_cpu_devices,
)

KINDS = ("stuck at 1", "stuck at 0", "scaled", "zero", "nan", "infinite", "rows")
SITES = ("activation", "weight", "cotangent", "gradient", "mask", "sent", "received", "statistics", "metric")
IN_A_LAYER = ("activation", "weight", "cotangent", "gradient")
AXIS, DEVICES, WIDTH, ROWS = "fsdp", 4, 16, 16


class DrawnFaults(Faults):
    """Faults of the kinds and sites of this module; ``fault`` is (site, kind, index, bit)."""

    def none(self) -> None:
        self.runs, self.run, self.device, self.fault = (), -1, 0, (0, 0, 0, 0)

    def draw(self, when: str, device: int, *fault: int) -> None:
        self.runs, self.run, self.device, self.fault = RUNS[when], -1, device, fault

    def at(self, site: str, x: jax.Array) -> jax.Array:
        """Returns ``x``, wrong if the fault is of this site."""
        return corrupted(x, self.fault_here(), site)

    def layer(self, x: jax.Array, forward: str, backward: str) -> jax.Array:
        """Returns ``x``, of which the value or the cotangent may be wrong."""
        return site_of(forward, backward)(x, self.fault_here())


def corrupted(x: jax.Array, fault: jax.Array, site: str) -> jax.Array:
    active, at, kind, index, bit = fault
    flat = x.astype(jnp.float32).ravel()
    mask, position = jnp.uint32(1) << bit.astype(jnp.uint32), index % flat.size
    bits = lax.bitcast_convert_type(flat, jnp.uint32)
    rows = x.astype(jnp.float32).reshape(max(1, x.shape[0] if x.ndim else 1), -1)
    row = index % len(rows)
    wrong = [
        lax.bitcast_convert_type(bits | mask, jnp.float32),
        lax.bitcast_convert_type(bits & ~mask, jnp.float32),
        flat * (1 + 2.0 ** -(bit % 23).astype(jnp.float32)),
        *(flat.at[position].set(value) for value in (0.0, jnp.nan, jnp.inf)),
        rows.at[row].set(rows[row - 1]).at[row - 1].set(rows[row]).ravel(),
    ]
    here = (active == 1) & (at == SITES.index(site))
    return jnp.where(here, jnp.stack(wrong)[kind].reshape(x.shape).astype(x.dtype), x)


@functools.cache
def site_of(forward: str, backward: str) -> Any:
    """Returns the identity of (x, fault), with a fault in its value and a fault in its cotangent."""
    return make_site(forward, backward, corrupted)


# -------------------------------------------------------------------------------------------------------------- models

FAULTS = DrawnFaults()
wrapped = functools.partial(shard_module_params, axis_name=AXIS, min_weight_size=64)


def dense(kernel: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ FAULTS.layer(kernel, "weight", "gradient") + bias)
    return FAULTS.layer(y, "activation", "cotangent")


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], WIDTH))
        return dense(kernel, self.param("bias", nn.initializers.normal(0.5), (WIDTH,)), x)


class Layers(nn.Module):
    """Layers with what ``also`` names: dropout, the model's own collective, statistics in a collection."""

    also: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x):
        x = wrapped(Dense)(name="first")(x)
        is_on_mesh = bool(jax.sharding.get_abstract_mesh().manual_axes)
        if "dropout" in self.also and self.has_rng("dropout"):
            kept = jax.random.bernoulli(self.make_rng("dropout"), 0.8, x.shape).astype(jnp.float32)
            x = x * FAULTS.at("mask", kept)
        if "collective" in self.also and is_on_mesh:
            x = x - FAULTS.at("received", lax.pmean(FAULTS.at("sent", jnp.mean(x, 0)), AXIS))
        if "statistics" in self.also:
            mean = self.variable("statistics", "mean", jnp.zeros, (WIDTH,))
            found = FAULTS.at("statistics", jnp.mean(lax.stop_gradient(x), 0))
            mean.value = 0.9 * mean.value + 0.1 * (lax.pmean(found, AXIS) if is_on_mesh else found)
        return wrapped(nn.Dense)(8, name="second")(x)


class NnxDense(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(rngs.params.normal((8, WIDTH)))
        self.bias = nnx.Param(rngs.params.normal((WIDTH,)))

    def __call__(self, x):
        return dense(self.kernel[...], self.bias[...], x)


class NnxLayers(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = NnxDense(rngs), nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(x))


def plain_loss(params, apply_fn, x, rng):
    return jnp.mean(apply_fn({"params": params}, x, rngs={"dropout": rng}) ** 2)


def loss_without_rng(params, apply_fn, x):
    return jnp.mean(apply_fn({"params": params}, x) ** 2)


def loss_with_metrics(params, apply_fn, x, rng):
    y = apply_fn({"params": params}, x)
    return jnp.mean(y**2), {"largest": jnp.mean(FAULTS.at("metric", jnp.max(lax.stop_gradient(jnp.abs(y)), -1)))}


def loss_with_collections(params, apply_fn, x, rng, collections):
    y, updated = apply_fn({"params": params, **collections}, x, mutable=list(collections))
    return jnp.mean(y**2), updated


def weighted_loss(params, apply_fn, x, rng):
    weights = (x[:, 0] > -0.5).astype(jnp.float32)
    losses = jnp.mean(apply_fn({"params": params}, x) ** 2, -1)
    return jnp.sum(weights * losses), jnp.sum(weights)


def nnx_layers() -> Any:
    return shard_modules(nnx_model(NnxLayers), (NnxDense, nnx.Linear), AXIS, min_weight_size=64)


# Model, loss, options of the step, sites.
CASES: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], tuple[str, ...]]] = {
    "dropout": (lambda: Layers(("dropout",)), plain_loss, {}, (*IN_A_LAYER, "mask")),
    "own collective": (lambda: Layers(("collective",)), plain_loss, {}, (*IN_A_LAYER, "sent", "received")),
    "collections": (
        lambda: Layers(("statistics",)),
        loss_with_collections,
        {},
        (*IN_A_LAYER, "statistics", "statistics"),
    ),
    "collections, minibatches": (
        lambda: Layers(("statistics",)),
        loss_with_collections,
        {"num_minibatches": 2},
        (*IN_A_LAYER, "statistics", "statistics"),
    ),
    "metrics": (Layers, loss_with_metrics, {"has_aux": True}, (*IN_A_LAYER, "metric", "metric")),
    "metrics, minibatches": (
        Layers,
        loss_with_metrics,
        {"has_aux": True, "num_minibatches": 2},
        (*IN_A_LAYER, "metric", "metric"),
    ),
    "weighted loss": (Layers, weighted_loss, {"weighted": True, "num_minibatches": 2}, IN_A_LAYER),
    "NNX": (nnx_layers, loss_without_rng, {}, IN_A_LAYER),
    "NNX, minibatches": (nnx_layers, loss_without_rng, {"num_minibatches": 4}, IN_A_LAYER),
}


# -------------------------------------------------------------------------------------------------------------- trials


def bits_of(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def trials(name: str, count: int, seed: int) -> dict[str, Any]:
    """Draws ``count`` faults in steps of a model; returns what came of them."""
    make, loss, options, sites = CASES[name]
    key = jax.random.key(3)
    mesh, x = DeviceMeshManager.create_device_mesh({AXIS: DEVICES}), jax.random.normal(jax.random.key(1), (ROWS, 8))
    rng, found = np.random.default_rng([seed, sorted(CASES).index(name)]), Counter[str]()
    FAULTS.none()
    state = create_train_state(make(), optax.adam(1e-2), mesh, key, x, batch_axes=AXIS)
    step = replayed(make_train_step(loss, mesh, AXIS, check_vma=False, **options), every=1)
    FAULTS.watch(step)
    given = [jax.tree.map(jnp.copy, state) for _ in range(2)]
    clean = bits_of(step(given[0], x, key))
    assert bits_of(step(given[1], x, key)) == clean, "two steps without a fault differ in a bit"
    wrong = []
    for number in range(count):
        when, site = (ONCE_FIRST, ONCE_SECOND, ALWAYS)[number % 3], sites[int(rng.integers(len(sites)))]
        device, kind = int(rng.integers(DEVICES)), int(rng.integers(len(KINDS)))
        drawn = (SITES.index(site), kind, int(rng.integers(1024)), int(rng.integers(8, 31)))
        FAULTS.draw(when, device, *drawn)
        fault = f"{when}, {site}, {KINDS[kind]}, device {device}, {drawn[2:]}"
        try:
            after = step(jax.tree.map(jnp.copy, state), x, key)
        except ReplayError as error:
            named = [suspect.id for suspect in error.devices]
            outcome = "found" if named == [device] else "found, of two" if device in named else "another named"
            if outcome != "found":
                wrong.append(f"{fault}: named {named}")
        else:
            outcome = "without effect" if bits_of(after) == clean else "missed"
            if outcome == "missed":
                wrong.append(f"{fault}: missed")
        found[outcome] += 1
    return {"model": name, **found, "which": wrong}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=24, help="faults for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    args = parser.parse_args(argv)
    simulate_cpu_devices(DEVICES)
    print(f"JAX {jax.__version__}", flush=True)
    for name in args.models:
        print(json.dumps(trials(name, args.trials, args.seed)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
