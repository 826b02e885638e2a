"""Tests of transformations around gathers (branches, mapped variables, placements): exact, or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import AXES, FLOAT32_ROUNDING, KEPT, fsdp, in_case, mesh_of, normal
from xlstm_jax.distributed import (
    accumulate_gradients,
    create_train_state,
    make_train_step,
    partition_specs,
    shard_modules,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel import larger_than

X = normal(1, (16, 16))


def state_of(model, *inputs):
    return create_train_state(
        model, KEPT, mesh_of(2, 4), jax.random.key(0), *inputs, batch_axes=AXES, allow_replicated=True
    )


def gradients(model, loss_fn, batch, inputs, check_vma):
    """Returns the gradients of a step of ``make_train_step``."""
    step = make_train_step(loss_fn, mesh_of(2, 4), AXES, check_vma=check_vma, allow_replicated=True)
    return unbox(step(state_of(model, *inputs), batch, jax.random.key(2))[0].opt_state)


def of_one_device(model, loss_fn, batch, inputs):
    params = model.init(jax.random.key(0), *inputs)["params"]
    return jax.grad(loss_fn)(params, model.apply, batch, jax.random.key(2))


def assert_same(got, want):
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
        found = jax.tree_util.tree_reduce(lambda _, x: x, got) if not path else got
        for key in path:
            found = found[key.key]
        np.testing.assert_allclose(found, leaf, rtol=0, atol=FLOAT32_ROUNDING * np.abs(leaf).max(), err_msg=str(path))


# --------------------------------------------------------------------------------------------------------- branches


class Branches(nn.Module):
    kind: str = "cond"

    @nn.compact
    def __call__(self, x, flag):
        first, second = nn.Dense(32, name="first"), nn.Dense(32, name="second")
        if self.is_initializing():
            first(x), second(x)
        if self.kind == "cond":
            x = nn.cond(flag, lambda m, x: first(x), lambda m, x: second(x), self, x)
        elif self.kind == "switch":
            branches = [lambda m, x: first(x), lambda m, x: second(x)]
            x = nn.switch(flag.astype(int), branches, self, x)
        else:
            x = jnp.where(flag, first(x), second(x))
        return nn.Dense(4)(x)


FLAGS = {
    "rows": lambda batch, rng: batch["x"].mean() > 0,
    "key": lambda batch, rng: jax.random.bernoulli(rng),
    "index": lambda batch, rng: lax.axis_index("fsdp") > 0,
    "scalar": lambda batch, rng: batch["flag"] > 0,
    "reduced": lambda batch, rng: lax.pmax(batch["x"].mean(), AXES) > 0,
}


def loss_by(flag):
    def loss_fn(params, apply_fn, batch, rng):
        return jnp.mean(apply_fn({"params": params}, batch["x"], FLAGS[flag](batch, rng)) ** 2)

    return loss_fn


WITH_FLAG = {"x": X, "flag": jnp.float32(1)}
INPUTS = X, jnp.array(True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "kind, flag, check_vma",
    [("cond", "rows", True), ("switch", "key", True), ("cond", "index", False), ("switch", "rows", False)],
)
def test_gather_in_cond_or_switch_raises_for_a_device_dependent_predicate(kind, flag, check_vma):
    model = shard_modules(Branches(kind), nn.Dense, "fsdp", 16)
    with pytest.raises(ValueError, match=r"'first/bias' is gathered in a branch .* along \('fsdp',\) .*pmax"):
        gradients(model, loss_by(flag), WITH_FLAG, INPUTS, check_vma)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "kind, flag, check_vma",
    [("cond", "scalar", True), ("cond", "scalar", False), ("cond", "reduced", False), ("where", "rows", True)],
)
def test_gradients_are_exact_for_cond_and_switch_with_an_equal_predicate_on_all_devices(kind, flag, check_vma):
    model, loss = Branches(kind), loss_by(flag)
    got = gradients(shard_modules(model, nn.Dense, "fsdp", 16), loss, WITH_FLAG, INPUTS, check_vma)
    if flag == "rows":
        slices = [loss_of(loss, model, {"x": rows}) for rows in jnp.split(X, 8)]
        want = jax.tree.map(lambda *g: sum(g) / 8, *slices)
    else:
        flags = {"x": X, "flag": WITH_FLAG["flag"]}
        want = of_one_device(model, loss_by("scalar"), flags, INPUTS)
    assert_same(got, want)


def loss_of(loss, model, batch):
    return of_one_device(model, loss, batch, INPUTS)


@pytest.mark.parametrize("way, check_vma", [("value_and_grad", True), ("accumulate_gradients", False)])
def test_custom_step_raises_for_a_gather_in_a_branch_with_differing_predicate(way, check_vma):
    model = shard_modules(Branches(), nn.Dense, "fsdp", 16)
    params = state_of(model, *INPUTS).params
    specs = partition_specs(params, mesh_of(2, 4))
    loss = loss_by("rows")

    def of_device(params, x):
        if way == "value_and_grad":
            return value_and_grad(loss, AXES)(params, model.apply, {"x": x}, None)[1]
        of_minibatch = lambda params, x, rng: loss(params, model.apply, {"x": x}, rng)  # noqa: E731
        return accumulate_gradients(of_minibatch, params, x, None, AXES)[1]

    step = jax.shard_map(of_device, mesh=mesh_of(2, 4), in_specs=(specs, P(AXES)), out_specs=specs, check_vma=check_vma)
    with pytest.raises(ValueError, match="is gathered in a branch"):
        jax.eval_shape(step, params, X)


# -------------------------------------------------------------------------------------------------- mapped variables


class ByHand(nn.Module):
    """Weight norm written with ``nn.map_variables``."""

    @nn.compact
    def __call__(self, x):
        def normed(tree):
            return jax.tree.map(lambda v: v / (1e-3 + jnp.linalg.norm(v)) if v.ndim == 2 else v, tree)

        dense = nn.map_variables(nn.Dense, "params", normed, lambda tree: tree, init=True, mutable=True)
        return nn.Dense(4, name="out")(jnp.tanh(dense(32, name="half")(x)))


class Normed(nn.Module):
    kind: type

    @nn.compact
    def __call__(self, x):
        options = {"update_stats": False} if self.kind is nn.SpectralNorm else {}
        return nn.Dense(4, name="out")(jnp.tanh(self.kind(nn.Dense(32, name="half"))(x, **options)))


def mean_square(params, apply_fn, batch, rng):
    return jnp.mean((apply_fn({"params": params}, batch) - batch[:, :4]) ** 2)


def with_stats(params, apply_fn, batch, rng, stats):
    return mean_square(params, lambda variables, x: apply_fn({**variables, **stats}, x), batch, rng), stats


MAPPED = {"by hand": ByHand(), "WeightNorm": Normed(nn.WeightNorm), "SpectralNorm": Normed(nn.SpectralNorm)}


@pytest.mark.parametrize("model", MAPPED.values(), ids=MAPPED)
def test_shard_modules_raises_for_a_module_inside_nn_map_variables(model):
    with pytest.raises(ValueError, match=r"'half' runs within an nn.map_variables .* where=.* path == ''"):
        state_of(shard_modules(model, nn.Dense, "fsdp", 16), X)


def is_model(path, module):
    return path == ""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name, where, check_vma",
    [
        ("by hand", is_model, True),
        ("by hand", larger_than(100), False),
        ("WeightNorm", is_model, False),
        ("SpectralNorm", larger_than(100), True),
    ],
    ids=["by hand", "by hand, by size", "WeightNorm", "SpectralNorm"],
)
def test_gradients_match_a_single_device_with_the_module_around_nn_map_variables_sharded(name, where, check_vma):
    model = MAPPED[name]
    loss = with_stats if name == "SpectralNorm" else mean_square
    sharded = shard_modules(model, where, "fsdp", 16)
    assert any(
        "fsdp" in str(spec) for spec in jax.tree.leaves(partition_specs(state_of(sharded, X).params, mesh_of(2, 4)))
    )
    variables = model.init(jax.random.key(0), X)
    params, stats = variables.pop("params"), variables
    args = (model.apply, X, None, stats) if stats else (model.apply, X, None)
    want = jax.grad(loss, has_aux=bool(stats))(params, *args)
    assert_same(gradients(sharded, loss, X, (X,), check_vma), want[0] if stats else want)


def test_guard_norm_of_a_shard_differs_from_norm_of_the_full_kernel():
    """Guard: the norm of a shard differs from the norm of the kernel, if a wrapper within ``nn.map_variables`` runs."""

    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.map_variables(
                fsdp(nn.Dense), "params", lambda t: jax.tree.map(lambda v: v / jnp.linalg.norm(v), t)
            )(32, name="half")(x)

    got = state_of(fsdp(nn.Dense)(32, name="half"), X).params
    apply = jax.shard_map(
        lambda p, x: Inside().apply({"params": {"half": p}}, x),
        mesh=mesh_of(2, 4),
        in_specs=(partition_specs(got, mesh_of(2, 4)), P(AXES)),
        out_specs=P(AXES),
        check_vma=False,
    )
    whole = unbox(got)
    assert not np.allclose(apply(got, X), X @ (whole["kernel"] / jnp.linalg.norm(whole["kernel"])), rtol=0.1)


# ---------------------------------------------------------------------------------------------------------- placement


def sum_loss(params, apply_fn, batch, rng):
    return jnp.mean(apply_fn({"params": params}, batch) ** 2)


@pytest.mark.parametrize("spec", [P("dp", "fsdp"), P(None, "fsdp"), P(("dp",), ("fsdp",))], ids=str)
def test_train_step_raises_for_a_batch_split_along_another_dim_than_rows(spec):
    state, step = state_of(fsdp(nn.Dense)(4), X), make_train_step(sum_loss, mesh_of(2, 4), AXES)
    placed = jax.device_put(X, NamedSharding(mesh_of(2, 4), spec))
    refused = r"batch of shape \(16, 16\) is placed as .* over \('fsdp',\).*shard_batch"
    for args, kwargs in (((placed, jax.random.key(0)), {}), ((), {"batch": placed, "rng": jax.random.key(0)})):
        with in_case(args=args, kwargs=kwargs), pytest.raises(ValueError, match=refused):
            step(state, *args, **kwargs)
    step(state, X, jax.random.key(0))  # the failed call has not donated the state


@pytest.mark.parametrize("spec", [P(), P("dp"), P("fsdp"), P(AXES), P(("fsdp", "dp"), None)], ids=str)
def test_train_step_accepts_batch_rows_in_any_placement_on_the_mesh(spec):
    state, step = state_of(fsdp(nn.Dense)(4), X), make_train_step(sum_loss, mesh_of(2, 4), AXES)
    step(state, jax.device_put(X, NamedSharding(mesh_of(2, 4), spec)), jax.random.key(0))
