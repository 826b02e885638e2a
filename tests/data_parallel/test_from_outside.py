"""Tests of models sharded from outside: same results as if the source had wrapped the modules."""

import functools
import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from tests.support import AXES, assert_same_bits, assert_same_params, integers, mesh_of, on_mesh, plain
from xlstm_jax.distributed import (
    Replicas,
    abstract_train_state,
    create_train_state,
    init_sharded,
    make_train_step,
    partition_specs,
    plan_sharding,
    shard_module_params,
    shard_modules,
)
from xlstm_jax.distributed.data_parallel import larger_than
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, true_value
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves
from xlstm_jax.distributed.plan import ShardingPlan

KEY = jax.random.key(0)
TOKENS = integers(1, (16, 6), 0, 24)
TX = optax.adamw(1e-2, eps=1e-3)
# An error of a gradient is divided by eps where the gradient is small, and the largest parameters are about 0.1.
THREE_STEPS = 1e-4

# ------------------------------------------------------------------------------- third-party models in several styles


class Layer(nn.Module):
    """Layer with submodules made in ``setup``, and a flag as a positional argument."""

    width: int = 16

    def setup(self):
        self.norm = nn.LayerNorm()
        self.up = nn.Dense(2 * self.width)
        self.down = nn.Dense(self.width)
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, deterministic=True):
        return x + self.drop(self.down(nn.gelu(self.up(self.norm(x)))), deterministic=deterministic)


class Layers(nn.Module):
    """A rematerialised list of layers, with numbers as names."""

    width: int = 16

    def setup(self):
        layer = nn.remat(Layer, static_argnums=(2,))
        self.layers = [layer(self.width, name=str(i)) for i in range(2)]

    def __call__(self, x, deterministic=True):
        for layer in self.layers:
            x = layer(x, deterministic)
        return x


class Tied(nn.Module):
    """A language model whose head reads the embedding through ``variables``."""

    vocab: int = 24
    width: int = 16

    def setup(self):
        self.wte = nn.Embed(self.vocab, self.width)
        self.h = Layers(self.width)
        self.head = nn.Dense(self.vocab, use_bias=False)

    def encode(self, tokens, deterministic=True):
        return self.h(self.wte(tokens), deterministic)

    def __call__(self, tokens, deterministic=True):
        x = self.encode(tokens, deterministic)
        return self.head.apply({"params": {"kernel": self.wte.variables["params"]["embedding"].T}}, x)


class Scanned(nn.Module):
    """Compact module with automatic Linen names and a scan of layers."""

    @nn.compact
    def __call__(self, tokens):
        class Step(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.Dense(16)(jnp.tanh(nn.Dense(32)(x))), None

        x = nn.Embed(24, 16)(tokens)
        stack = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(Step), **stack, length=3)(name="steps")(x, None)
        return nn.Dense(24)(x)


class Recurrent(nn.Module):
    """Recurrent cells that initialise their carry."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.RNN(nn.LSTMCell(16))(nn.Embed(24, 16)(tokens))
        return nn.Dense(24)(nn.RNN(nn.GRUCell(16), reverse=True, keep_order=True)(x))


def loss_fn(params, apply_fn, tokens, rng):
    del rng
    return optax.softmax_cross_entropy_with_integer_labels(apply_fn({"params": params}, tokens), tokens).mean()


@functools.cache
def three_steps_on_one_device(model):
    """Returns the parameters at the start and after three steps of AdamW on the full batch."""
    start = params = jax.jit(model.init)(KEY, TOKENS)["params"]
    state = TX.init(params)

    @jax.jit
    def step(params, state):
        updates, state = TX.update(jax.grad(loss_fn)(params, model.apply, TOKENS, None), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
    return start, params


def units(model, *inputs, mesh=None):
    """Returns the paths of the gathering modules in the plan."""
    rows = plan_sharding(model, (mesh or mesh_of(2, 4)).shape, *inputs).rows
    return {row.gathered_with for row in rows if row.gathered_with is not None}


SMALL = {"axis_name": "fsdp", "min_weight_size": 64}
CASES: dict[str, tuple[Any, Any, dict[str, Any], set[str]]] = {
    "tied head": (Tied(), (Layer, nn.Embed), {}, {"wte", "h/0", "h/1"}),
    "nested, gathered again": (
        Tied(),
        lambda path, module: path == "" or isinstance(module, Layer),
        {"reshard_after_forward": True},
        {"", "h/0", "h/1"},
    ),
    "scan, hybrid": (Scanned(), lambda path, module: path == "steps", {"replicas": Replicas("dp")}, {"steps"}),
    "by size, padded": (Tied(25, 15), larger_than(300), {"uneven": "pad", "min_weight_size": 8}, set()),
    "recurrent": (Recurrent(), nn.RNN, {}, {"LSTMCell_0", "GRUCell_0"}),
}
RUNS = [(name, True) for name in CASES] + [("tied head", False), ("recurrent", False)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name, check_vma", RUNS, ids=lambda value: value if isinstance(value, str) else f"{value}")
def test_shard_modules_three_training_steps_match_a_single_device(name, check_vma):
    model, where, options, chosen = CASES[name]
    sharded, mesh = shard_modules(model, where, **{**SMALL, **options}), mesh_of(2, 2)
    start, want = three_steps_on_one_device(model)
    state = create_train_state(sharded, TX, mesh, KEY, TOKENS, batch_axes=AXES)
    assert chosen <= units(sharded, TOKENS)
    split = [leaf for _, leaf in leaves_with_path(state.params) if leaf_of(leaf).axes]
    assert len(split) >= 2  # guard: some leaves are split
    assert_same_params(map_leaves(true_value, state.params), start, 3e-7)
    step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma)
    for _ in range(3):
        state, _ = step(state, TOKENS, KEY)
    assert_same_params(map_leaves(true_value, state.params), want, THREE_STEPS)
    assert not np.allclose(jax.tree.leaves(start)[-1], jax.tree.leaves(want)[-1], rtol=0.01)  # guard: parameters move


def test_shard_modules_and_shard_module_params_compile_to_equal_collectives_and_plans():
    class Source(nn.Module):
        wrap: Any

        @nn.compact
        def __call__(self, tokens):
            x = self.wrap(nn.Embed)(24, 16, name="embed")(tokens)
            for i in range(2):
                x = nn.remat(self.wrap(Layer))(name=f"layer_{i}")(x)
            return x

    wrapped = Source(partial(shard_module_params, **SMALL))
    outside = shard_modules(Source(plain), (nn.Embed, Layer), **SMALL)

    def program(model):
        make = partial(abstract_train_state, model, TX, mesh_of(2, 4), KEY, TOKENS, batch_axes=AXES)
        return make_train_step(loss_fn, mesh_of(2, 4), AXES).lower(make(), TOKENS, KEY).compile().as_text()

    programs = program(wrapped), program(outside)
    for kind in ("all-gather", "all-reduce", "reduce-scatter"):
        counts = [len(re.findall(rf" {kind}(?:-start)?\(", text)) for text in programs]
        assert counts[0] == counts[1] > 0
    plans = [plan_sharding(model, mesh_of(2, 4).shape, TOKENS, tx=TX) for model in (wrapped, outside)]
    assert plans[0].diff(plans[1]) == []


def test_plan_rows_name_the_gathering_module_and_keep_the_name_in_json():
    def chosen(path, module):
        return path in ("", "h/0")

    plan = plan_sharding(shard_modules(Tied(), chosen, **SMALL), {"fsdp": 4}, TOKENS)
    assert {row.path: row.gathered_with for row in plan.rows if "kernel" in row.path or "wte" in row.path} == {
        "h/0/down/kernel": "h/0",
        "h/0/up/kernel": "h/0",
        "h/1/down/kernel": "",
        "h/1/up/kernel": "",
        "wte/embedding": "",
    }
    assert plan.explain("h/0/up/kernel").endswith("once in a forward pass, with all of the module 'h/0'.")
    assert ShardingPlan.from_json(plan.to_json()) == plan


# ------------------------------------------------------------------------------------------------- choice of modules

WHERE = {
    "a class": (Layer, {"h/0", "h/1"}),
    "several classes": ((nn.Embed, Layers), {"wte", "h"}),
    "a predicate of the path": (lambda path, module: path.endswith("up"), {"h/0/up", "h/1/up"}),
    "the model itself": (Tied, {""}),
    "by size, the rest too": (larger_than(380), {"wte", "h/0/up", "h/0/down", "h/1/up", "h/1/down"}),
    "by size, what several have together": (larger_than(600), {"h/0", "h/1"}),
}


@pytest.mark.parametrize("where, want", WHERE.values(), ids=WHERE)
def test_shard_modules_where_selects_the_expected_units(where, want):
    assert units(shard_modules(Tied(), where, **SMALL), TOKENS) == want


def test_shard_modules_accepts_a_matched_module_without_parameters():
    model = nn.Sequential([nn.Dense(16), nn.Dropout(0.5, deterministic=True), nn.Dense(8)])
    assert units(shard_modules(model, (nn.Dropout, nn.Dense), **SMALL), jnp.ones((8, 16))) == {"layers_0", "layers_2"}
    with pytest.warns(UserWarning, match="no parameter is split.*no wrapped module owns it"):
        create_train_state(
            shard_modules(model, nn.Dropout, **SMALL), TX, mesh_of(2, 4), KEY, jnp.ones((8, 16)), batch_axes=AXES
        )


def test_nested_shard_modules_calls_keep_separate_options():
    model = shard_modules(Tied(), Layer, "fsdp", 64, "bfloat16")
    model = shard_modules(model, nn.Embed, "dp", 64)
    rows = plan_sharding(model, {"dp": 2, "fsdp": 4}, TOKENS)
    up, embedding = rows.row("h/0/up/kernel"), rows.row("wte/embedding")
    assert (up.axes, up.gather_dtype, up.gathered_with) == (("fsdp",), "bfloat16", "h/0")
    assert (embedding.axes, embedding.gather_dtype, embedding.gathered_with) == (("dp",), "float32", "wte")


# ------------------------------------------------------------------------------------------------- as a Linen module


@functools.cache
def initialised(model):
    return init_sharded(model, mesh_of(2, 4), KEY, TOKENS, batch_axes=AXES)


def whole_in_shard_map(model, run):
    """Returns ``run(model, variables, tokens)`` inside ``shard_map``, with the variables of ``init_sharded``."""
    mesh, variables = mesh_of(2, 4), initialised(model)
    specs = partition_specs(variables, mesh)
    return on_mesh(partial(run, model), mesh, True, (specs, P(AXES)), P(AXES))(variables, TOKENS)


USED = shard_modules(Tied(), (Layer, nn.Embed), **SMALL)


USES = {
    "a method by its name": lambda m, v, x: m.apply(v, x, method="encode"),
    "a method": lambda m, v, x: m.apply(v, x, method=m.encode),
    "a method of the plain class": lambda m, v, x: m.apply(v, x, method=Tied.encode),
    "bound": lambda m, v, x: m.bind(v).encode(x),
    "submodules of a bound one": lambda m, v, x: m.bind(v).h(m.bind(v).wte(x)),
    "dropout": lambda m, v, x: m.apply(v, x, False, rngs={"dropout": KEY}),
    "intermediates": lambda m, v, x: jax.tree.leaves(
        m.apply(v, x, capture_intermediates=True, mutable=["intermediates"])
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use", USES)
def test_sharded_model_gives_plain_results_for_each_linen_use(use):
    variables = three_steps_on_one_device(Tied())[0]
    got = jax.tree.leaves(whole_in_shard_map(USED, USES[use]))
    if use == "dropout":  # each device draws for its local batch
        assert not [i for i, leaf in enumerate(got) if not np.isfinite(leaf).all()]
        return
    for g, w in zip(got, jax.tree.leaves(USES[use](Tied(), {"params": variables}, TOKENS)), strict=True):
        assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_shard_modules_outside_shard_map_equals_the_plain_model_bit_for_bit():
    model = shard_modules(Tied(), Layer, "fsdp")
    assert (type(model).__name__, type(model).__module__, model.vocab) == ("Tied", Tied.__module__, 24)
    assert isinstance(model, Tied) and model.clone(vocab=5).vocab == 5
    want, got = jax.jit(Tied().init)(KEY, TOKENS), jax.jit(model.init)(KEY, TOKENS)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_same_bits(got, want)
    assert_array_equal(jax.jit(model.apply)(got, TOKENS), jax.jit(Tied().apply)(want, TOKENS))
    assert nn.tabulate(model, KEY)(TOKENS) == nn.tabulate(Tied(), KEY)(TOKENS)


def test_shard_modules_accepts_partials_classes_and_nested_models():
    class Outer(nn.Module):
        wrap: Any

        @nn.compact
        def __call__(self, tokens):
            made = self.wrap(partial(Tied, vocab=24))(name="lm")
            x = nn.remat(self.wrap(Layers))(name="more")(made.encode(tokens))
            return nn.Dense(24)(x)

    def shard(model):
        return shard_modules(model, (Layer, nn.Embed), **SMALL)

    variables = jax.jit(Outer(plain).init)(KEY, TOKENS)
    want = jax.jit(Outer(plain).apply)(variables, TOKENS)
    assert_allclose(whole_in_shard_map(Outer(shard), lambda m, v, x: m.apply(v, x)), want, rtol=1e-4, atol=1e-5)
    assert units(Outer(shard), TOKENS) == {"lm/wte", *(f"{name}/{i}" for name in ("lm/h", "more") for i in range(2))}

    class Scans(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = nn.scan(shard_modules(Body, nn.Dense, **SMALL), {"params": 0}, split_rngs={"params": True}, length=2)
            return body(name="layers")(x, None)[0]

    rows = plan_sharding(Scans(), {"fsdp": 4}, jnp.ones((8, 16))).rows
    assert {(row.path, row.shape, row.names, row.gathered_with) for row in rows if "kernel" in row.path} == {
        ("layers/Dense_0/kernel", (2, 16, 16), (None, None, "fsdp"), "layers/Dense_0")
    }


class Body(nn.Module):
    """The body of a scan over layers."""

    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(16)(x), None


def test_init_sharded_shards_params_only_beside_batch_stats_and_in_two_methods():
    class TwoWays(nn.Module):
        def setup(self):
            self.norm = nn.BatchNorm(use_running_average=False)
            self.first, self.second = nn.Dense(16), nn.Dense(16)

        def encode(self, x):
            return self.norm(self.first(x))

        def __call__(self, x):
            return self.second(self.encode(x)) + self.encode(x)

    x = jax.random.normal(KEY, (16, 16))
    model = shard_modules(TwoWays(), nn.Dense, **SMALL)
    got = init_sharded(model, mesh_of(2, 4), KEY, x, batch_axes=AXES)
    assert_same_params(got, jax.jit(TwoWays().init)(KEY, x), 3e-7)
    assert {path for path, leaf in leaves_with_path(got) if leaf_of(leaf).axes} == {
        "params/first/kernel",
        "params/second/kernel",
    }


def test_shard_module_params_on_nn_rnn_matches_the_plain_model():
    class Wrapped(nn.Module):
        wrap: Any

        @nn.compact
        def __call__(self, tokens):
            x = nn.one_hot(tokens, 16)
            return self.wrap(nn.RNN)(nn.SimpleCell(16), time_major=True, name="rnn")(x.swapaxes(0, 1)).swapaxes(0, 1)

    variables = jax.jit(Wrapped(plain).init)(KEY, TOKENS)
    got = whole_in_shard_map(Wrapped(partial(shard_module_params, **SMALL)), lambda m, v, x: m.apply(v, x))
    assert_allclose(got, jax.jit(Wrapped(plain).apply)(variables, TOKENS), rtol=1e-4, atol=1e-5)


class Scaling(nn.RNN):
    """A recurrence whose call takes further arguments than the one of Flax."""

    def __call__(self, inputs, scale):
        return super().__call__(scale * inputs)


class LastState(nn.RNN):
    """A recurrence whose call takes fewer arguments than the one of Flax."""

    def __call__(self, inputs):
        return super().__call__(inputs)[:, -1]


class OfSubclasses(nn.Module):
    wrap: Any

    @nn.compact
    def __call__(self, tokens):
        x = self.wrap(Scaling)(nn.SimpleCell(16), name="scaling")(nn.one_hot(tokens, 16), 0.5)
        return self.wrap(LastState)(nn.LSTMCell(16), name="last")(x)


@pytest.mark.parametrize("wrap", [plain, partial(shard_module_params, **SMALL)], ids=["from outside", "wrapped"])
def test_subclasses_of_nn_rnn_with_other_arguments_match_the_plain_model(wrap):
    variables = jax.jit(OfSubclasses(plain).init)(KEY, TOKENS)
    model = shard_modules(OfSubclasses(plain), **SMALL) if wrap is plain else OfSubclasses(wrap)
    got = whole_in_shard_map(model, lambda m, v, x: m.apply(v, x))
    assert_allclose(got, jax.jit(OfSubclasses(plain).apply)(variables, TOKENS), rtol=1e-4, atol=1e-5)


def test_shard_modules_keeps_a_decorated_init_of_the_model():
    class Configured(nn.Module):
        features: int = 16

        @nn.compact
        def __call__(self, x):
            assert self.config == {"features": self.features}
            return nn.Dense(self.features)(x)

    made = Configured.__init__

    @functools.wraps(made)
    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        object.__setattr__(self, "config", {"features": self.features})

    Configured.__init__ = init
    assert units(shard_modules(Configured(32), nn.Dense, **SMALL), jnp.ones((8, 16))) == {"Dense_0"}


def test_shard_modules_warns_of_a_scan_within_a_unit_but_not_of_a_scan_over_units():
    def create(where):
        model = shard_modules(Scanned(), where, **SMALL)
        create_train_state(model, optax.sgd(0.1), mesh_of(2, 4), KEY, TOKENS, batch_axes=AXES)

    with pytest.warns(UserWarning, match=r"'steps' scans over layers of .*Step within a module"):
        create(Scanned)
    create(lambda path, module: path in ("", "steps"))
