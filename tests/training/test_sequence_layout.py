"""Tests of the sequence layout: a contradiction between model and step raises while the step is traced."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.support import in_case
from xlstm_jax.distributed import DeviceMeshManager, create_train_state, make_eval_step, make_train_step, shard_batch
from xlstm_jax.distributed.device_mesh import to_zigzag
from xlstm_jax.distributed.metrics import WeightedMean
from xlstm_jax.distributed.model_parallel import (
    ReorderedTokens,
    context_attention,
    context_positions,
    recurrence_over_axis,
)

BATCH = {"x": np.ones((4, 16), np.int32), "of_row": np.ones(4, np.float32)}
SPEC = {"x": P("fsdp", "cp"), "of_row": P("fsdp")}
ROWS = {"batch_axes": ("fsdp", "cp"), "batch_spec": None}
ZIGZAG = to_zigzag(BATCH, 2)


@pytest.fixture(scope="module")
def mesh():
    return DeviceMeshManager.create_device_mesh({"fsdp": 2, "cp": 2}, devices=jax.devices()[:4])


class Model(nn.Module):
    """Attention over "cp", or a recurrence; ``layout`` and ``positions`` are arguments of the calls."""

    layout: str | None = None
    positions: str | None = None
    recurrence: bool = False
    axis: str = "cp"

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8, 4)(tokens)
        if self.recurrence:
            return x + recurrence_over_axis(jnp.ones(()), x[:, -1])[:, None]
        x = x + nn.Embed(16, 4)(context_positions(x.shape[1], self.axis, self.positions))
        y = x[:, :, None]
        return x + context_attention(y, y, y, self.axis, layout=self.layout)[:, :, 0]


def traced(mesh, model, batch, is_evaluation=False, check_vma=True, **options):
    """Returns the trace of a step with the model on the batch."""
    key, split = jax.random.key(0), {"batch_spec": SPEC, "check_vma": check_vma} | options
    state = create_train_state(model, optax.sgd(0.1), mesh, key, BATCH["x"], batch_axes="fsdp", allow_replicated=True)
    if not is_evaluation:
        loss = lambda params, apply_fn, batch, rng: apply_fn({"params": params}, batch["x"]).mean()  # noqa: E731
        return make_train_step(loss, mesh, allow_replicated=True, **split).trace(state, batch, key)
    metric = WeightedMean()
    eval_fn = lambda params, apply_fn, batch: {"values": apply_fn({"params": params}, batch["x"])}  # noqa: E731
    step = make_eval_step(eval_fn, mesh, metric=metric, **split)
    return step.trace(state, batch, metric.empty(("fsdp", "cp"), mesh))


NAMED = r"given layout='zigzag', and the tokens of this step lie contiguous over 'cp'"
REFUSED = {
    "the model says zigzag": (Model("zigzag"), BATCH, {}, NAMED),
    "positions say zigzag": (Model(positions="zigzag"), BATCH, {}, f"context_positions is {NAMED}"),
    "the model says contiguous": (
        Model("contiguous"),
        ZIGZAG,
        {},
        r"context_attention is given layout='contiguous', and the tokens of this step lie zigzag",
    ),
    "positions say contiguous": (
        Model(positions="contiguous"),
        BATCH,
        {"layout": "zigzag"},
        r"context_positions is given layout='contiguous'",
    ),
    "the step says contiguous": (
        Model(),
        ZIGZAG,
        {"layout": "contiguous"},
        r"batch\['x'\] of shape \(4, 16\) is laid out in zigzag, and the layout here is layout='contiguous'",
    ),
    "a recurrence": (
        Model(recurrence=True),
        BATCH,
        {"layout": "zigzag"},
        r"recurrence_over_axis is of tokens that lie contiguous, and the tokens of this step lie zigzag over 'cp'",
    ),
    "attention over rows": (
        Model(),
        BATCH,
        ROWS,
        r"context_positions over 'cp': the step splits rows .* over \('fsdp', 'cp'\).* by batch_spec=P\('fsdp', 'cp'\)",
    ),
    "a recurrence over rows": (
        Model(recurrence=True),
        BATCH,
        ROWS,
        r"recurrence_over_axis over 'cp': the step splits rows of its batch over \('fsdp', 'cp'\)",
    ),
    "rows of a batch that is laid out": (Model(), ZIGZAG, ROWS, r"for 2 devices, and its dim 1 is not split"),
    "laid out for others": (
        Model(),
        to_zigzag(BATCH, 4),
        {},
        r"laid out in zigzag for 4 devices, and 2 split its dim 1",
    ),
    "a leaf that is not split": (
        Model(),
        {**BATCH, "of_row": ReorderedTokens(np.ones((4, 16)), "zigzag", 2)},
        {},
        r"batch\['of_row'\] .* for 2 devices, and its dim 1 is not split \(its spec is .*'fsdp'",
    ),
    "an odd number of tokens": (
        Model(),
        {**BATCH, "x": np.ones((4, 14), np.int32)},
        {"layout": "zigzag"},
        r"batch\['x'\] of shape \(4, 14\): 14 tokens do not divide into the 4 chunks .* to 16 tokens",
    ),
    "no sequence": (
        Model(),
        BATCH,
        ROWS | {"layout": "zigzag"},
        r"layout='zigzag', and batch_axes=.* splits no sequence",
    ),
    "no layout": (Model(), BATCH, {"layout": "striped"}, r"layout='striped': pass 'contiguous' or 'zigzag'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_train_and_eval_steps_raise_for_a_contradicting_sequence_layout(case, mesh):
    model, batch, options, match = REFUSED[case]
    modes = [{"check_vma": True}, {"check_vma": False}, {"is_evaluation": True}]
    for mode in modes:
        with in_case(mode=mode), pytest.raises(ValueError, match=match):
            traced(mesh, model, batch, **options, **mode)


def test_make_train_step_raises_for_two_sequence_axes_with_zigzag_layout():
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2, "cp": 2, "w": 2})
    with pytest.raises(ValueError, match=r"splits other dims over \('cp',\) and over \('w',\); the tokens of one"):
        make_train_step(
            lambda *args: 0.0, mesh, batch_spec={"x": P("fsdp", "cp"), "y": P("fsdp", "w")}, layout="zigzag"
        )


@pytest.mark.parametrize("batch", [BATCH, ZIGZAG], ids=["natural", "laid out"])
def test_batch_already_in_zigzag_layout_needs_no_ppermute(batch, mesh):
    """A batch in zigzag layout needs no exchange, and every argument may name the same layout."""
    placed = shard_batch(batch, mesh, batch_spec=SPEC)
    found = traced(mesh, Model("zigzag", "zigzag"), placed, layout="zigzag")
    assert str(found.jaxpr).count("ppermute[") == (2 if batch is BATCH else 0)  # attention gathers keys


def test_layouts_on_a_sequence_axis_of_size_1_need_no_ppermute():
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 4, "cp": 1}, devices=jax.devices()[:4])
    for batch in (BATCH, to_zigzag(BATCH, 1)):
        for layout in (None, "zigzag"):
            assert "ppermute[" not in str(traced(mesh, Model("zigzag"), batch, layout=layout).jaxpr)
