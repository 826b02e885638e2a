"""Tests of padded batches: training equals the real rows on one device; code that counts copies is warned about."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from tests.support import AXES, FLOAT32_ROUNDING, assert_same_params, fsdp, mesh_of
from xlstm_jax.distributed import (
    DeviceMeshManager,
    check_step,
    create_train_state,
    make_eval_step,
    make_train_step,
    shard_batch,
    unbox,
)
from xlstm_jax.distributed.device_mesh.batch_layout import batch_layout
from xlstm_jax.distributed.metrics import Compose, Max, WeightedMean
from xlstm_jax.distributed.metrics.cells import Count, Maximum, Total
from xlstm_jax.distributed.training import mistakes, padded_rows
from xlstm_jax.distributed.training.gradients import LossFunction
from xlstm_jax.distributed.training.padded_rows import LOCAL_MEAN, LOSS, counting_padding, with_names
from xlstm_jax.distributed.training.step_check.copies import padded_row_findings, with_other_copies
from xlstm_jax.distributed.training.step_check.one_device import OneDevice

KEY, MESH = jax.random.key(0), mesh_of(2, 4)
ROWS = {"x": np.random.default_rng(0).normal(size=(11, 16)).astype(np.float32), "seen": np.ones(11, bool)}


@pytest.fixture(autouse=True)
def nothing_was_told():
    mistakes._warned.clear()


class Normalised(nn.Module):
    """Divides each row by its norm, and by its standard deviation."""

    @nn.compact
    def __call__(self, x):
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        x = fsdp(nn.Dense)(16)(x)
        return nn.Dense(4)(x / jnp.std(x, axis=-1, keepdims=True))


class OfBatch(nn.Module):
    """Normalises by batch statistics, or by running averages."""

    frozen: bool = False

    @nn.compact
    def __call__(self, x, mask=None):
        axes = None if self.frozen or self.is_initializing() else AXES
        return fsdp(nn.Dense)(4)(nn.BatchNorm(self.frozen, axis_name=axes)(x, mask=mask))


class LookedUp(nn.Module):
    """Looks up rows of a split table, which devices exchange."""

    @nn.compact
    def __call__(self, x):
        return fsdp(nn.Embed)(64, 16)(x[:, 0].astype(int))


def errors_of(params, apply_fn, batch):
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - 1) ** 2, axis=-1)


def weighted(params, apply_fn, batch, rng):
    return jnp.sum(errors_of(params, apply_fn, batch) * batch["weight"]), jnp.sum(batch["weight"])


def state_of(model):
    return create_train_state(model, optax.sgd(0.1), MESH, KEY, ROWS["x"][:8], batch_axes=AXES)


def padded(rows=11, with_weight=True):
    batch, weight = shard_batch({name: x[:rows] for name, x in ROWS.items()}, MESH, AXES, pad=True)
    return batch | ({"weight": weight} if with_weight else {})


# ------------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("check_vma, rows", [(True, 11), (False, 3)])
def test_padded_batch_trains_as_the_unpadded_rows_on_a_single_device(check_vma, rows):
    """A padded batch trains as its rows on one device, also if five devices have copies alone (3 rows)."""

    def loss_fn(params, x):
        return jnp.mean(errors_of(params, Normalised().apply, {"x": x}))

    state, x = state_of(Normalised()), ROWS["x"][:rows]
    params = jax.tree.map(jnp.copy, jax.device_get(unbox(state.params)))
    step = make_train_step(weighted, MESH, AXES, weighted=True, check_vma=check_vma)
    for _ in range(2):
        want, grads = jax.value_and_grad(loss_fn)(params, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        state, metrics = step(state, padded(rows), KEY)
        assert_allclose(metrics["loss"], want, rtol=FLOAT32_ROUNDING)
    assert_same_params(state.params, params)
    zeros = jnp.concatenate([x, jnp.zeros((16 - rows, 16))])
    grads = jax.grad(lambda p: weighted(p, Normalised().apply, {"x": zeros, "weight": np.arange(16) < rows}, None)[0])
    assert np.isnan(grads(params)["Dense_0"]["kernel"]).any()  # guard: so would rows of zeros


# ------------------------------------------------------------------------------------------ code that counts the copies


def with_statistics(params, apply_fn, batch, rng, collections, mask=None):
    out, updated = apply_fn({"params": params, **collections}, batch["x"], mask, mutable=list(collections))
    return (jnp.sum(out[:, 0] ** 2 * batch["weight"]), jnp.sum(batch["weight"])), updated


def beside(**numbers):
    def loss_fn(params, apply_fn, batch, rng):
        made = {name: make(errors_of(params, apply_fn, batch), batch) for name, make in numbers.items()}
        return weighted(params, apply_fn, batch, rng), made

    return loss_fn


def trained(loss_fn=weighted, model=None, with_weight=True, weighted=True, **options):
    step = make_train_step(loss_fn, MESH, AXES, weighted=weighted, **options)
    local = [options["metric"].empty(AXES, MESH)] if "metric" in options else []
    for _ in range(2):
        state = state_of(model or fsdp(nn.Dense)(4))
        step(state, padded(with_weight=with_weight), KEY, *local)


def evaluated(metric, observe):
    def eval_fn(params, apply_fn, batch):
        return observe(errors_of(params, apply_fn, batch), batch["weight"])

    make_eval_step(eval_fn, MESH, AXES, metric=metric)(state_of(fsdp(nn.Dense)(4)), padded(), metric.empty(AXES, MESH))


def unweighted(params, apply_fn, batch, rng):
    return errors_of(params, apply_fn, batch).mean()


def of_device(params, apply_fn, batch, rng):
    total, weight = weighted(params, apply_fn, batch, rng)
    return total / jnp.maximum(weight, 1)


def reduced(params, apply_fn, batch, rng):
    total, weight = weighted(params, apply_fn, batch, rng)
    return 8 * total / jax.lax.psum(weight, AXES)


def of_seen(params, apply_fn, batch, rng):
    return jnp.sum(errors_of(params, apply_fn, batch) * batch["seen"]), jnp.sum(batch["seen"])


def compared(params, apply_fn, batch, rng, masked=False):
    """Compares each row with the rows of all devices; rows of weight 0 are excluded only with ``masked``."""
    out = apply_fn({"params": params}, batch["x"])
    logits = out @ jax.lax.all_gather(out, AXES, tiled=True).T
    if masked:
        logits = jnp.where(jax.lax.all_gather(batch["weight"], AXES, tiled=True) > 0, logits, -1e9)
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) * batch["weight"]), jnp.sum(batch["weight"])


BOTH = Compose({"a": WeightedMean(), "b": WeightedMean(), "c": Max()})
TOLD = {
    "an own mask": (lambda: trained(of_seen, with_weight=False), "is in no leaf of the batch, 'seen', 'x': copies"),
    "an own mask beside the weights": (lambda: trained(of_seen), "the loss is computed without the weights of rows"),
    "no use": (lambda: trained(unweighted, weighted=False), r"the loss is computed without the weights.*weighted=True"),
    "a mean of means": (lambda: trained(of_device, weighted=False), "the loss is the mean of the devices' means"),
    "all rows": (
        lambda: trained(lambda *args: (weighted(*args)[0], len(args[2]["x"]))),
        r"the weight of the loss is computed without.*jnp.sum\(batch\['weight'\]\)",
    ),
    "beside the loss": (
        lambda: trained(beside(n=lambda e, b: Count.of(b["seen"]), mean=lambda e, b: e.mean()), has_aux=True),
        r"beside the loss 'mean', 'n' is computed without.*Total.of\(x, weight\)",
    ),
    "statistics": (
        lambda: trained(with_statistics, OfBatch()),
        "the collections 'batch_stats/BatchNorm_0/mean', .*/var' are computed without.*that the devices divide",
    ),
    "statistics that are not kept": (
        lambda: trained(lambda *args: (with_statistics(*args)[0], {}), OfBatch()),
        "the loss depends on a sum over the rows of all devices without their weights. Weigh the rows",
    ),
    "a comparison with all rows": (
        lambda: trained(compared),
        "the loss compares rows of all devices, .*Gather the weights too",
    ),
    "a metric": (
        lambda: evaluated(BOTH, lambda e, w: {"a": (e, w), "b": e, "c": e}),
        r"the metric 'b' gets no weights of rows. .*metric.update\(..., weight=batch\['weight'\]\)",
    ),
}
RIGHT = {
    "weights": trained,
    "reduced weights": lambda: trained(reduced, weighted=False),
    "numbers with weights": lambda: trained(
        beside(total=lambda e, b: Total.of(e, b["weight"]), worst=lambda e, b: Maximum.of(e), one=lambda e, b: 1.0),
        has_aux=True,
    ),
    "a metric with weights": lambda: evaluated(BOTH, lambda e, w: {"a": (e, w), "b": {"values": e * w}, "c": e}),
    "one metric with weights": lambda: evaluated(WeightedMean(), lambda e, w: {"values": e, "weight": w}),
    "a comparison with rows of weight 1": lambda: trained(partial(compared, masked=True)),
    "rows of a split table": lambda: trained(model=LookedUp()),
    "statistics that stay": lambda: trained(with_statistics, OfBatch(frozen=True)),
}


@pytest.mark.parametrize("mistake, says", TOLD.values(), ids=TOLD)
def test_train_and_eval_steps_warn_once_of_padded_rows_in_the_loss_or_metrics(mistake, says):
    with pytest.warns(UserWarning, match=says) as told:
        mistake()
    assert len(told) == 1 and told[0].filename == __file__


def test_mean_by_the_weights_of_a_device_counts_padding_and_one_by_all_weights_does_not():
    mesh = mesh_of(1, 2)
    batch, batch["weight"] = shard_batch({"x": np.ones(3, np.float32)}, mesh, AXES, pad=True)

    def counted(total_of):
        def local(batch):
            loss = jnp.sum(batch["x"] * batch["weight"]) / total_of(jnp.sum(batch["weight"]))
            return with_names(loss, LOSS)[None]

        step = jax.shard_map(local, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES))
        return counting_padding(step, None, AXES, batch, (batch,), {})

    assert list(counted(lambda weight: weight)) == [LOCAL_MEAN]
    assert counted(lambda weight: jax.lax.psum(weight, AXES)) == {}


@pytest.mark.parametrize("program", RIGHT.values(), ids=RIGHT)
def test_train_and_eval_steps_with_row_weights_give_no_warning_on_a_padded_batch(program):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program()


def all_rows(x, axis="dp"):
    return jax.lax.psum(x.sum(), axis)


# Results of a device by kind, a metric, and the results that count copies.
COUNTED = {
    "rows": (lambda x, w: {"loss": x.sum()}, None, {"loss": [""]}),
    "rows and weights of all": (lambda x, w: {"loss": (x * w).sum() / all_rows(w)}, None, {}),
    "rows and weights of the device": (lambda x, w: {"loss": (x * w).sum()}, None, {"mean of local means": [""]}),
    "a sum of parts of a row": (lambda x, w: {"loss": w * all_rows(x, "tp") / all_rows(w)}, None, {}),
    "a sum of all rows": (lambda x, w: {"loss": w * all_rows(x) / all_rows(w)}, None, {"statistic": [""]}),
    "the largest row": (lambda x, w: {"loss": (x / x.max()).sum() * w.sum() / all_rows(w)}, None, {}),
    "largest of each column": (lambda x, w: {"aux:c": x.max(0)}, None, {"aux": ["c"]}),
    "largest of all": (lambda x, w: {"aux:c": x.max(), "aux:d": x.min()}, None, {}),
    "numbers of rows": (lambda x, w: {"weight of the loss": jnp.ones(()), "loss": (x * w).sum()}, None,
                        {"weight of the loss": [""]}),
    "both": (lambda x, w: {"weight of the loss": jnp.ones(()), "loss": x.sum()}, None, {"loss": [""]}),
    "integers of others": (lambda x, w: {"loss": w * jax.lax.all_gather(x.astype(int), "dp").sum() / all_rows(w)},
                           None, {}),
    "rows of others": (lambda x, w: {"weight of the loss": w.sum(),
                                     "loss": w * jax.lax.all_gather(x, "dp").sum()}, None, {"comparison": [""]}),
    "a collection of statistics": (lambda x, w: {"collection:mean": all_rows(x), "loss": w * all_rows(x) / all_rows(w)},
                                   None, {"collection": ["mean"]}),
    "a metric": (lambda x, w: {"aux:values": x, "aux:other": w}, WeightedMean(), {}),
    "a metric without weights": (lambda x, w: {"aux:values": x}, WeightedMean(), {"metric": [""]}),
    "a maximum": (lambda x, w: {"metric:values": x}, Max(), {}),
    "metrics": (lambda x, w: {"metric:a/values": x, "metric:c/values": x, "metric:b/values": x, "metric:b/weight": w},
                Compose({"a": WeightedMean(), "b": WeightedMean(), "c": Max()}), {"metric": ["a"]}),
}  # fmt: skip


@pytest.mark.parametrize("results, metric, expected", COUNTED.values(), ids=COUNTED)
def test_results_that_count_copies_are_found_by_kind(results, metric, expected):
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "tp": 2}, devices=jax.devices()[:4])
    batch, weight = shard_batch({"x": np.ones((3, 2), np.float32)}, mesh, "dp", pad=True)
    batch["weight"] = weight

    def local(batch):
        for name, value in results(batch["x"], batch["weight"]).items():
            kind, _, path = name.partition(":")
            padded_rows.with_names(value, kind, path)
        return batch["weight"]

    step = jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
    found = padded_rows.counting_padding(step, metric, ("dp",), batch, (batch,), {})
    assert found == expected


# ----------------------------------------------------------------------------------------------------------- check_step


def contrastive(params, apply_fn, batch, rng, masked=False):
    """Compares each row with the rows of the device; rows of weight 0 are excluded only with ``masked``."""
    out = apply_fn({"params": params}, batch["x"])
    others = batch["weight"] > 0 if masked else batch["weight"] >= 0
    logits = jnp.where(others, out @ out.T, -1e9)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.diagonal(logits)
    return jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])


@pytest.mark.parametrize(
    "loss_fn, counts", [(contrastive, True), (partial(contrastive, masked=True), False)], ids=["", "masked"]
)
def test_check_step_finds_a_loss_comparing_rows_with_padded_rows(loss_fn, counts):
    state = state_of(fsdp(nn.Dense)(4))
    batch = padded()
    found = [
        *padded_row_findings(
            OneDevice(LossFunction(loss_fn, True), batch_layout(MESH, AXES), 1, state, batch, MESH), batch, KEY
        )
    ]
    assert bool(found) == counts and all("the loss counts rows that only pad" in text for text in found)


def test_other_copies_of_padded_rows_are_of_the_next_rows():
    batch, _ = shard_batch({"x": np.float32([1, 2, 3])}, MESH, AXES, pad=True)
    assert np.asarray(batch["x"]).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert with_other_copies(batch)["x"].tolist() == [1, 2, 3, 2, 3, 1, 2, 3]


def test_check_step_accepts_a_weighted_loss_on_a_padded_batch_but_no_custom_mask():
    step, state = make_train_step(weighted, MESH, AXES, weighted=True), state_of(fsdp(nn.Dense)(4))
    assert check_step(step, state, padded(), KEY).ok
    step = make_train_step(of_seen, MESH, AXES, weighted=True)
    assert "counts rows that only pad" in str(check_step(step, state, padded(), KEY).findings)
