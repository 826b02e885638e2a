"""Tests of ``scan_layers``, which gathers layers ahead: parameters, gradients and bytes equal the plain scan."""

from collections import defaultdict
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.support import AXES, assert_same_bits, assert_same_params, data, equations, fsdp, mesh_of, on_mesh
from xlstm_jax.distributed import (
    Replicas,
    accumulate_gradients,
    init_sharded,
    partition_specs,
    scan_layers,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.prefetch import prefetched_scan
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.collectives import to_varying
from xlstm_jax.forecast.cost.collective_traffic import find_collectives
from xlstm_jax.forecast.hlo.program import parse
from xlstm_jax.introspection import scans_over_params

LAYERS, WIDTH = 4, 16
P = jax.P


class Layer(nn.Module):
    """Residual block with dropout, a per-layer and a shared input, a small replicated leaf, and an output."""

    rate: float = 0.0
    hidden: int = 32

    @nn.compact
    def __call__(self, carry, scale, shift):
        x, count = carry
        h = nn.gelu(nn.Dense(self.hidden)(nn.LayerNorm()(x) * scale + shift))
        h = nn.Dropout(self.rate, deterministic=not self.rate)(h)
        return (x + nn.Dense(WIDTH)(h), count + 1), jnp.mean(h)


class Model(nn.Module):
    """Dense, scanned layers, Dense; the carry has an integer, which takes no gradient."""

    layer: Any
    prefetch: bool = True

    @nn.compact
    def __call__(self, x):
        x, shift = nn.Dense(WIDTH)(x), self.param("shift", nn.initializers.ones, (WIDTH,))
        scales = self.param("scales", nn.initializers.normal(1.0), (LAYERS, WIDTH))
        scan = scan_layers(self.layer.func, LAYERS, in_axes=(0, nn.broadcast), prefetch=self.prefetch)
        (x, count), means = scan(**self.layer.keywords, name="layers")((x, jnp.int32(0)), scales, shift)
        return nn.Dense(WIDTH // 4)(x) + means.sum() * count


def loss(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch["x"], rngs={"dropout": rng})
    return jnp.mean((out - batch["y"]) ** 2)


def step_of(model, mesh, check_vma, minibatches=1):
    """Returns a step (loss and gradient over all devices) and the arguments of the step."""
    batch = {name: data()[name] for name in "xy"}
    params = init_sharded(model, mesh, jax.random.key(0), batch["x"], batch_axes=AXES)["params"]
    specs = partition_specs(params, mesh)

    def step(params, batch, rng):
        def of_part(params, part, rng):
            return loss(params, model.apply, part, rng)

        return accumulate_gradients(of_part, params, batch, rng, AXES, minibatches)

    return on_mesh(step, mesh, check_vma, (specs, P(AXES), P()), (P(), specs)), (params, batch, jax.random.key(1))


CASES = {
    "2x4, staged, padded, accumulated": ((2, 4), True, 2, {"axis_name": AXES, "uneven": "pad"}, {"hidden": 33}),
    "8": ((1, 8), True, 1, {}, {}),
    "2x4, staged, dropout": ((2, 4), False, 1, {"axis_name": AXES}, {"rate": 0.5}),
    "HSDP": ((2, 4), True, 1, {"replicas": Replicas("dp")}, {}),
}


@cache
def both_steps(case):
    shape, check_vma, minibatches, options, fields = CASES[case]
    layer = partial(fsdp(Layer, **options), **fields)
    return [step_of(Model(layer, prefetch), mesh_of(*shape), check_vma, minibatches) for prefetch in (True, False)]


# The first and the last iterations are compiled separately: fusion rounds differently by some float32 units.
@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_prefetched_scan_losses_and_gradients_match_the_plain_scan(case):
    (got, got_grads), (want, want_grads) = (step(*args) for step, args in both_steps(case))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert_same_params(got_grads, want_grads, 2e-6)
    vanishing = [path for path, leaf in leaves_with_path(unbox(want_grads)) if np.abs(leaf).max() <= 1e-3]
    assert not vanishing  # guard


def test_prefetched_scan_pairs_each_layer_with_the_right_weights():
    """``prefetched_scan`` pairs layers with weights; layers double the carry and add a weight, so order matters."""
    weights = np.float32([1, 10, 100, 1000])[:, None] * np.ones((4, 2), np.float32)
    mesh = mesh_of(1, 2)

    def run(shards):
        layer = lambda weights, carry, inputs, shared: (2 * carry + weights, ())  # noqa: E731
        stacked = Sharded(shards, ("fsdp",))
        return prefetched_scan(layer, stacked, to_varying(jnp.zeros(2), ("fsdp",)), (), (), ())[0]

    last = on_mesh(run, mesh, True, P(None, "fsdp"), P("fsdp"))(weights)
    assert last.tolist() == 2 * [8.0 * 1 + 4 * 10 + 2 * 100 + 1000] * 2


def sent_bytes(step, args, mesh):
    """Returns the bytes that a device sends, by kind of collective."""
    program, sent = parse(step.lower(*args).compile().as_text()), defaultdict(float)
    trips = {instruction.name: n for computation, n in program.executed() for instruction in computation.instructions}
    for found in find_collectives(program, dict(mesh.shape)):
        sent[found.kind] += trips[found.name] * found.wire_bytes
    return sent


def test_prefetch_sends_no_more_all_gather_or_reduce_scatter_bytes():
    ahead, without = (sent_bytes(*step, mesh_of(2, 4)) for step in both_steps("2x4, staged, dropout"))
    assert ahead["reduce-scatter"] == without["reduce-scatter"] > 0
    # Backward first gathers the layer that forward gathered last: XLA may notice, and gather the layer once.
    assert 0.8 * without["all-gather"] < ahead["all-gather"] <= without["all-gather"]


def products_wait_for_gathers(step, args):
    """Returns for each gathering forward loop whether a product reads a result of the same iteration's gathers."""
    found = []
    for _, eqn in equations(jax.make_jaxpr(step)(*args)):
        body = eqn.params["jaxpr"].jaxpr if eqn.primitive.name == "scan" else None
        if body is None or not holds(body.eqns, "all_gather") or holds(body.eqns, "optimization_barrier"):
            continue
        gathered, waits = set(), False
        for inner in body.eqns:
            reads = any(not hasattr(x, "val") and x in gathered for x in inner.invars)
            waits |= holds([inner], "dot_general") and (reads or holds([inner], "all_gather"))
            if reads or holds([inner], "all_gather"):
                gathered.update(inner.outvars)
        found.append(waits)
    return found


def holds(eqns, primitive):
    return any(e.primitive.name == primitive for outer in eqns for _, e in [((), outer), *inner_equations(outer)])


def inner_equations(eqn):
    params = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
    return [found for p in params if hasattr(p, "eqns") or hasattr(p, "jaxpr") for found in equations(p)]


def test_prefetched_products_do_not_depend_on_gathers_of_the_same_iteration():
    ahead, without = both_steps("2x4, staged, dropout")
    assert products_wait_for_gathers(*ahead) == [False]
    assert True in products_wait_for_gathers(*without)  # guard


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layers", [1, 3])
def test_prefetch_matches_the_plain_scan_for_very_few_layers(layers):
    class Few(nn.Module):
        prefetch: bool

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(scan_layers(fsdp(Plain, axis_name=AXES), layers, prefetch=self.prefetch)()(x)[0])

    results = [step(*args) for step, args in (step_of(Few(on), mesh_of(2, 2), False) for on in (True, False))]
    assert_same_params(*(grads for _, grads in results), 2e-6)


class Plain(nn.Module):
    """Layer without inputs and outputs beside the carry; features stay 8."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(16)(x))), None


def test_scan_layers_equals_nn_scan_over_nn_remat_bit_for_bit():
    wrapped, x = fsdp(Plain), jnp.ones((8, 8))
    again = nn.remat(wrapped, prevent_cse=False)
    scan = nn.scan(again, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)

    class Holder(nn.Module):
        layers: Any

        @nn.compact
        def __call__(self, x):
            return self.layers()(x)[0]

    want = Holder(scan).init_with_output(jax.random.key(0), x)
    got = Holder(scan_layers(wrapped, 3)).init_with_output(jax.random.key(0), x)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_same_bits(got, want)


@pytest.mark.parametrize("prefetch, ahead", [(True, 2), (False, 0)])
def test_scan_gathers_the_weights_of_its_first_layer_ahead_of_the_loop_only_with_prefetch(prefetch, ahead):
    """A layer has two split kernels, and the loop gathers both for each of its iterations."""
    model = scan_layers(fsdp(Plain), 3, prefetch=prefetch)()

    def run(x):
        params = model.init(jax.random.key(0), x)["params"]
        return model.apply({"params": params}, x)[0]

    found = equations(jax.make_jaxpr(on_mesh(run, mesh_of(1, 8), True, P("fsdp"), P("fsdp")))(jnp.ones((8, 8))))
    in_loop = ["scan" in within for within, eqn in found if eqn.primitive.name == "all_gather"]
    assert (in_loop.count(False), in_loop.count(True)) == (ahead, 2)


def test_scans_over_params_recognises_the_class_from_scan_layers():
    assert scans_over_params(scan_layers(Plain, 3))
