"""Tests of a third module library: a sketch of an adapter over ``unit``, for modules that are pytrees as Equinox's.

Equinox is no dependency of the project. ``Module`` has the relevant property: a frozen dataclass that is a pytree.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import AXES, as_called, assert_same_params, data, mean_loss, mesh_of
from xlstm_jax.distributed import create_train_state, make_train_step, plan_sharding, shard_modules, unbox
from xlstm_jax.distributed.data_parallel.modules import unit
from xlstm_jax.distributed.data_parallel.modules.dropping import dropping

KEY = jax.random.key(0)
BATCH = data(features=8)
SMALL = {"axis_name": "fsdp", "min_weight_size": 64}

# ------------------------------------------------------------------------------------------------ a library of modules


class Module:
    def __init_subclass__(cls):
        dataclasses.dataclass(frozen=True)(cls)
        jax.tree_util.register_dataclass(cls, [field.name for field in dataclasses.fields(cls)], [])


class Linear(Module):
    kernel: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.kernel + self.bias

    def transposed(self, x):
        return x @ self.kernel.T


class Mlp(Module):
    up: Linear
    down: Linear

    def __call__(self, x):
        h = jnp.tanh(self.up(x))
        return self.down(h + self.up(self.up.transposed(h)))


def make(key):
    first, second = jax.random.split(key)
    up = Linear(jax.random.normal(first, (8, 32)) / 4, jnp.zeros(32))
    return Mlp(up, Linear(jax.random.normal(second, (32, 4)) / 4, jnp.zeros(4)))


# --------------------------------------------------------------------------------------------------------- the adapter

PYTREES = unit.ModuleSystem(Module)


@dataclasses.dataclass(frozen=True)
class Model:
    """The module that ``make`` returns, with ``init`` and ``apply``; ``shard_modules`` chooses the units."""

    make: object
    chosen: tuple = ()

    def with_units(self, where, policy):
        return Model(self.make, (*self.chosen, (unit.as_predicate(where, PYTREES), policy)))

    def init(self, rng, *inputs):
        del inputs
        return {"params": params_of(self._with_units(self.make(rng), split))}

    def apply(self, variables, *inputs):
        bound = with_params(jax.eval_shape(self.make, KEY), variables["params"])
        return self._with_units(bound, lambda module, policy: module)(*inputs)

    def _with_units(self, module, prepared, path=""):
        """Returns the module with units, innermost first; each chosen module is ``prepared``, then becomes a unit."""
        for name, value in vars(module).items():
            if isinstance(value, Module):
                inner = self._with_units(value, prepared, f"{path}/{name}".lstrip("/"))
                module = dataclasses.replace(module, **{name: inner})
        for matches, policy in self.chosen:
            if matches(path, module):
                return unit_type(type(module), policy)(**vars(prepared(module, policy)))
        return module


def params_of(module):
    return {name: params_of(value) if isinstance(value, Module) else value for name, value in vars(module).items()}


def with_params(module, params):
    inner = {name: value for name, value in vars(module).items() if isinstance(value, Module)}
    return type(module)(**params | {name: with_params(value, params[name]) for name, value in inner.items()})


def split(module, policy):
    return with_params(module, unit.shard_here(policy, {"params": params_of(module)})["params"])


@functools.cache
def unit_type(cls, policy):
    def gathering(plain):
        def whole(module, *args, **kwargs):
            gathered = unit.gather_here(policy, {"params": params_of(module)})["params"]
            return plain(cls(**vars(with_params(module, gathered))), *args, **kwargs)

        def method(self, *args, **kwargs):
            return unit.entered(PYTREES, cls.__name__, dropping(whole, PYTREES, policy), self, args, kwargs)

        return functools.wraps(plain)(method)

    methods = {name: gathering(getattr(cls, name)) for name in unit.public_methods(cls, PYTREES)}
    return type(cls.__name__, (cls,), methods)


# --------------------------------------------------------------------------------------------------------------- tests


def step_of(model, check_vma):
    mesh = mesh_of(2, 4)
    state = create_train_state(model, optax.sgd(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES, allow_replicated=True)
    return state, make_train_step(mean_loss, mesh, AXES, check_vma=check_vma, allow_replicated=True)


@pytest.mark.parametrize(
    "where, split_leaves, check_vma",
    [(Linear, 2, True), (lambda path, _: path == "up", 1, False), (Module, 2, True)],
    ids=["by class", "by path", "one within the other"],
)
def test_third_party_module_system_trains_as_on_a_single_device(where, split_leaves, check_vma):
    start = Model(make).init(KEY)["params"]
    grads = jax.grad(mean_loss)(start, Model(make).apply, BATCH)
    state, step = step_of(shard_modules(Model(make), where, **SMALL), check_vma)
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(state.params)]
    assert sum("fsdp" in spec for spec in specs) == split_leaves

    state, _ = step(state, BATCH, KEY)

    assert_same_params(unbox(state.params), jax.tree.map(lambda p, g: p - 0.1 * g, start, grads))


def test_third_party_units_gather_in_each_method_and_reshard_after_forward():
    counts = []
    for options in ({}, {"reshard_after_forward": True}):
        state, step = step_of(shard_modules(Model(make), Linear, **SMALL, **options), True)
        counts.append(as_called(step.lower(state, BATCH, KEY).as_text()).count("stablehlo.all_gather"))
    # Kept, each of the two weights is gathered once. Dropped, a weight is gathered in each of four calls, and in the
    # backward pass but for up(x), as x has no gradient.
    assert counts == [2, 7]


def test_plan_lists_units_of_a_third_party_module_system_and_raises_for_other_classes():
    plan = plan_sharding(shard_modules(Model(make), Linear, **SMALL), {"fsdp": 4}, BATCH["x"])
    units = {row.path: row.gathered_with for row in plan.rows if row.parts > 1}
    assert units == {"up/kernel": "up", "down/kernel": "down"}
    with pytest.raises(TypeError, match="pass a module class"):
        shard_modules(Model(make), np.ndarray, **SMALL)
