"""Every pair of a feature of the library and an axis of the model: three steps are those of one device.

The model has all that is split over an axis: embedding, attention and feed-forward over "tp", tokens between them too
(in the cells of "sp"), experts over "ep", and a sequence over "cp". An axis that a cell is not about has one device.
The axes of the batch are all but "tp".
"""

from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import KEPT, assert_same_params, fsdp, plain, train_on_one_device
from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    LMHead,
    Offload,
    Replicas,
    create_train_state,
    ema_params,
    make_train_step,
    muon,
    scan_layers,
    shard_modules,
    skip_nonfinite,
    unbox,
    with_ema,
)
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step
from xlstm_jax.distributed.model_parallel import (
    Experts,
    SplitAttention,
    SplitEmbed,
    SwiGLU,
    context_attention,
    context_positions,
    join_tokens,
    on_split_input,
    split_tokens,
)
from xlstm_jax.distributed.optimizers import matrix_dimensions

VOCAB, WIDTH, LENGTH, ROWS = 24, 8, 8, 16
TOKENS = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, VOCAB)
LABELS = jnp.where(jnp.arange(ROWS * LENGTH).reshape(TOKENS.shape) % 3 == 0, -100, jnp.roll(TOKENS, -1, axis=1))
BATCH_AXES = ("dp", "fsdp", "ep", "cp")
BATCH_SPEC = P(BATCH_AXES[:-1], "cp")


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(WIDTH, bias_init=nn.initializers.normal(0.5))(x)))


def attend(query, key, value, impl):
    """Positions count, so that each device must know which tokens it has."""
    angle = context_positions(query.shape[1]).astype(jnp.float32)[None, :, None, None] / 3.0
    return context_attention(query * jnp.cos(angle), key * jnp.cos(angle), value, impl=impl)


class Layer(nn.Module):
    mixture: bool
    sequence: bool
    impl: str

    @nn.compact
    def __call__(self, x, _=None):
        split = {"sequence_dim": 1} if self.sequence else {}
        norm = on_split_input(nn.RMSNorm, "tp") if self.sequence else nn.RMSNorm
        attention = SplitAttention(4, 2, 2, partial(attend, impl=self.impl), **split, name="attention")
        x = x + attention(norm(name="norm")(x))
        x = x + SwiGLU(16, **split, name="gated")(x)
        if self.mixture:
            whole = join_tokens(x, 1, "tp") if self.sequence else x
            mixed = Experts(Expert(), 4, 2, block_size=4, name="mixture")(whole)
            x = x + (split_tokens(mixed, 1, "tp") if self.sequence else mixed)
        return x, None


class Decoder(nn.Module):
    mixture: bool = False
    sequence: bool = False
    impl: str = "ring"
    layers: str = "one"
    wrap: Any = plain

    @nn.compact
    def __call__(self, tokens, labels):
        split = {"sequence_dim": 1} if self.sequence else {}
        x = self.wrap(SplitEmbed)(VOCAB, WIDTH, **split, name="embed")(tokens)
        layer = self.wrap(Layer)
        again = nn.remat(layer, prevent_cse=False) if self.layers in ("remat", "scan and remat") else layer
        if self.layers == "prefetched":
            layers = scan_layers(layer, 2)
        elif "scan" in self.layers:
            layers = nn.scan(again, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        else:
            layers = again
        x, _ = layers(self.mixture, self.sequence, self.impl, name="layers")(x, None)
        norm = on_split_input(nn.RMSNorm, "tp") if self.sequence else nn.RMSNorm
        x = self.wrap(norm)(name="norm")(x)
        return self.wrap(LMHead)(VOCAB, vocab_axis="tp", chunk_size=5, **split, name="head").losses(x, labels)


def loss_fn(params, apply_fn, batch, rng):
    del rng
    found = apply_fn({"params": params}, *batch)
    return found.loss.sum() + 1e-3 * (found.log_normalizer**2).sum(), (batch[1] >= 0).sum()


def observing_loss(params, apply_fn, batch, rng):
    del rng
    found = apply_fn({"params": params}, *batch)
    counts = (batch[1] >= 0).astype(jnp.float32)
    return (found.loss.sum(), counts.sum()), {"values": found.correct.astype(jnp.float32), "weight": counts}


# ----------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Feature:
    """What a cell adds: how modules are wrapped, the state made, and the step; the layers of the model."""

    tx: optax.GradientTransformation = field(default_factory=lambda: optax.sgd(0.3, momentum=0.9))
    wrapping: dict = field(default_factory=dict)
    making: dict = field(default_factory=dict)
    stepping: dict = field(default_factory=dict)
    layers: str = "one"
    tolerance: float = 1e-5
    outside: bool = False


HEADS = {  # without a bias: nothing else tells
    "*/attention/out/kernel": optax.contrib.MuonDimensionNumbers((0, 1), 2),
    "*/attention/*/kernel": optax.contrib.MuonDimensionNumbers(0, (1, 2)),
}
MUON = muon(1e-2, muon_weight_dimension_numbers=matrix_dimensions(HEADS))


def is_trained(path):
    return not path.startswith(("embed", "layers/gated"))


FEATURES = {
    "clipping": Feature(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))),
    "minibatches": Feature(stepping={"num_minibatches": 2}),
    "minibatches, reduced once": Feature(stepping={"num_minibatches": 2, "accumulation": "reduce_once"}),
    "skip_nonfinite": Feature(skip_nonfinite(optax.sgd(0.3, momentum=0.9))),
    "remat": Feature(layers="remat"),
    "scan and remat": Feature(layers="scan and remat"),
    "prefetched": Feature(layers="prefetched"),
    "gathered again": Feature(wrapping={"reshard_after_forward": True}),
    "from outside": Feature(outside=True),
    "padded": Feature(wrapping={"uneven": "pad", "min_weight_size": 0}),
    "copies": Feature(wrapping={"replicas": Replicas("dp")}),
    "copies reduced once": Feature(
        wrapping={"replicas": Replicas("dp")},
        stepping={"num_minibatches": 2, "accumulation": "reduce_replicas_once"},
    ),
    "ZeRO-1": Feature(optax.adam(1e-2), wrapping={"replicas": Replicas("dp", shard_optimizer_state=True)}),
    "frozen": Feature(making={"trainable": is_trained}),
    "frozen in int8": Feature(making={"trainable": is_trained, "frozen_dtype": "int8"}, tolerance=0.05),
    # AdamW updates the head, and there one entry has gradients of 1e-5, 3e-6 and 1e-4, where the largest is 0.2. Their
    # rounding, 6e-9 (3e-8 of the largest), is 7e-4 of what AdamW divides by in the second step: at a rate of 1e-2 the
    # entry moves by 6e-6 more or less. So one device in float32 is 1.0e-5 from float64 (JAX 0.10), in this entry alone,
    # and two programs in float32 are up to twice as far from each other. Muon's own matrices agree to 1e-7.
    "muon": Feature(MUON, tolerance=3e-5),
    "adafactor": Feature(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "average": Feature(with_ema(optax.sgd(0.3), 0.5)),
    "scan": Feature(layers="scan"),
    "offload": Feature(optax.adam(1e-2), making={"offload": Offload()}),
    "int8 gathers": Feature(wrapping={"gather_dtype": "int8"}, tolerance=0.05),
    "bfloat16 gathers": Feature(wrapping={"gather_dtype": "bfloat16"}, tolerance=0.05),
    "bfloat16 scatters": Feature(wrapping={"grad_scatter_dtype": "bfloat16"}, tolerance=0.01),
    "metric": Feature(stepping={"metric": WeightedMean()}),
    "checkpoint": Feature(optax.adam(1e-2)),
}
AXES = {"tp": {"tp": 2}, "sp": {"tp": 2}, "ep": {"ep": 2}, "cp": {"cp": 2}}
CELLS = [(feature, axis) for feature in FEATURES for axis in AXES]
MODES = dict(zip(CELLS, cycle([True, False, False, True, False, True, False]), strict=False))  # check_vma


# --------------------------------------------------------------------------------------------------------- both sides


def mesh_of(sizes):
    sizes = {"dp": 2, "fsdp": 2, "tp": 1, "ep": 1, "cp": 1} | sizes
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return DeviceMeshManager.create_device_mesh(sizes, devices=devices)


def state_on(mesh, model, tx=KEPT, making=None):
    batch = TOKENS, LABELS
    state = create_train_state(
        model, tx, mesh, jax.random.key(0), *batch, batch_axes=BATCH_AXES[:-1], whole_ok=True, **(making or {})
    )
    return state, batch


@cache
def initial(mixture, layers):
    model = Decoder(mixture, layers=layers)
    return jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0), TOKENS, LABELS)["params"])


@cache
def of_one_device(mixture, feature):
    """Parameters, optimizer state and losses after three steps."""
    how, frozen = FEATURES[feature], optax.set_to_zero()
    params, tx = initial(mixture, how.layers), how.tx
    if "trainable" in how.making:
        labels = jax.tree_util.tree_map_with_path(
            lambda path, _: how.making["trainable"](jax.tree_util.keystr(path, simple=True, separator="/")), params
        )
        tx = optax.multi_transform({True: tx, False: frozen}, labels)
    model = Decoder(mixture, layers=how.layers)
    loss = loss_fn if "metric" not in how.stepping else lambda *args: observing_loss(*args)[0]
    return train_on_one_device(model, tx, params, loss, (TOKENS, LABELS), 3)


@pytest.mark.one_in(50)
@pytest.mark.parametrize("feature, axis", CELLS)
def test_three_steps_of_a_pair_are_those_of_one_device(feature, axis, tmp_path):
    how, mesh, check_vma = FEATURES[feature], mesh_of(AXES[axis]), MODES[feature, axis]
    mixture = axis == "ep"
    wrap = partial(fsdp, **{"min_weight_size": 16, **how.wrapping})
    model = Decoder(mixture, axis == "sp", layers=how.layers, wrap=plain if how.outside else wrap)
    if how.outside:
        model = shard_modules(model, (SplitEmbed, Layer, LMHead), "fsdp", 16)
    state, batch = state_on(mesh, model, how.tx, how.making)
    if "frozen_dtype" not in how.making:
        jax.tree.map(np.testing.assert_array_equal, unbox(state.params), initial(mixture, how.layers))
    want, want_state, losses = of_one_device(mixture, feature)
    loss, local = loss_fn, ()
    if metric := how.stepping.get("metric"):
        loss, local = observing_loss, (metric.empty(BATCH_AXES, mesh),)
    make = partial(
        make_train_step, loss, batch_spec=BATCH_SPEC, layout="zigzag", weighted=True, whole_ok=True, **how.stepping
    )
    step, rel = make(mesh=mesh, check_vma=check_vma), how.tolerance
    for number, want_loss in enumerate(losses):
        if feature == "checkpoint" and number == 1:
            mesh = mesh_of({"fsdp": 4} if axis != "tp" else {"tp": 4, "dp": 1})
            with Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(0, state)
                target, batch = state_on(mesh, model, how.tx)
                state = checkpointer.restore(target)
            step = make(mesh=mesh, check_vma=check_vma)
        state, metrics, *local = step(state, batch, jax.random.key(number), *local)
        assert float(metrics["loss"]) == pytest.approx(want_loss, rel=rel)
    assert_same_params(state.params, want, rel)
    if feature == "average":
        assert_same_params(ema_params(state.opt_state, state.params), ema_params(want_state, want), rel)
    if metric:
        correct = make_log_step(metric, mesh, BATCH_AXES)(local[0])[0]
        assert 0 < float(correct) < 1
    start = initial(mixture, how.layers)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), want, start)
    assert max(jax.tree.leaves(moved)) > 1e-2 and abs(losses[2] - losses[0]) > 1e-3  # guard: it was trained


# ---------------------------------------------------------------------------------------------------------- the meshes

MESHES = [
    {"fsdp": 2, "tp": 2, "cp": 2},
    {"fsdp": 2, "tp": 2, "ep": 2},
    {"fsdp": 2, "ep": 2, "cp": 2},
    {"tp": 2, "ep": 2, "cp": 2},
    {"dp": 2, "tp": 2, "cp": 2},
    {"dp": 2, "fsdp": 2, "tp": 2},
    {"dp": 2, "fsdp": 2, "ep": 2},
    {"dp": 2, "fsdp": 2, "cp": 2},
    {"fsdp": 2, "cp": 4},
    {"fsdp": 4, "tp": 2},
    {"fsdp": 2, "ep": 4},
]
CLIPPED = {name: optax.chain(KEPT, optax.clip_by_global_norm(0.1), tx) for name, tx in {
    "adamw": optax.adamw(1e-2),
    "muon": MUON,
}.items()}  # fmt: skip


@cache
def ten_steps_of_one_device(optimizer):
    model = Decoder(True)
    return train_on_one_device(model, CLIPPED[optimizer], initial(True, "one"), loss_fn, (TOKENS, LABELS), 10)


HOW = [("adamw", True), ("muon", False), ("adamw", False), ("muon", True)]
RUNS = [(shape, *HOW[(number + turn) % 4]) for turn in range(4) for number, shape in enumerate(MESHES)]


@pytest.mark.one_in(44)
@pytest.mark.parametrize("shape, optimizer, check_vma", RUNS, ids=str)
def test_ten_accumulated_steps_on_a_mesh_are_those_of_one_device(shape, optimizer, check_vma):
    """Clipped; tokens between layers are split over "tp" where "cp" leaves them whole, and whole where it does not."""
    mesh = mesh_of({"dp": 1, "fsdp": 1} | shape)
    model = Decoder(
        True, "cp" not in shape, "ulysses" if shape.get("cp") == 2 else "ring", wrap=partial(fsdp, min_weight_size=16)
    )
    state, batch = state_on(mesh, model, CLIPPED[optimizer])
    params, opt_state, losses = ten_steps_of_one_device(optimizer)
    how = {"batch_spec": BATCH_SPEC, "layout": "zigzag", "num_minibatches": 2, "weighted": True, "check_vma": check_vma}
    step = make_train_step(loss_fn, mesh, **how, whole_ok=True)
    for want in losses:
        state, metrics = step(state, batch, jax.random.key(0))
        assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)
    assert_same_params(state.opt_state[0], opt_state[0])
    assert_same_params(state.params, params, 1e-4)  # ten times rounded, and divided by small second moments
    assert losses[-1] < 0.8 * losses[0]  # guard: it was trained
