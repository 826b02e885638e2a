"""Shared helpers of the tests: meshes by shape, small models to wrap, and comparisons up to float32 rounding."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xlstm_jax.distributed import DeviceMeshManager, create_train_state, make_train_step, shard_module_params, unbox
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, path_string
from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes
from xlstm_jax.equations import name_and_params

AXES = ("dp", "fsdp")
FLOAT32_ROUNDING = 1e-5

KINDS = "all.reduce|all.gather|reduce.scatter|all.to.all|collective.permute|collective.broadcast"


@contextmanager
def in_case(**values: Any) -> Iterator[None]:
    """Adds the variables of a loop to the message of a check that fails within the block, such as ``pytest.raises``."""
    try:
        yield
    except (AssertionError, pytest.fail.Exception) as failure:
        case = ", ".join(f"{name}={value!r:.200}" for name, value in values.items())
        raise AssertionError(f"for {case}: {failure}") from failure


@cache
def mesh_of(dp: int, fsdp: int):
    """Returns a dp x fsdp mesh on the first dp * fsdp devices."""
    return DeviceMeshManager.create_device_mesh({"dp": dp, "fsdp": fsdp}, devices=jax.devices()[: dp * fsdp])


def on_mesh(fn: Callable, mesh, check_vma: bool, in_specs: Any, out_specs: Any) -> Callable:
    """Returns ``jit(shard_map(fn))``."""
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def fsdp(cls=None, *, axis_name: Any = "fsdp", min_weight_size: int = 32, **options):
    """Applies ``shard_module_params`` with a threshold for small models; without ``cls`` returns a decorator."""
    wrap = partial(shard_module_params, axis_name=axis_name, min_weight_size=min_weight_size, **options)
    return wrap if cls is None else wrap(cls)


def plain(cls):
    """Returns ``cls`` unchanged, as a wrapper for unsharded models."""
    return cls


class Block(nn.Module):
    """Residual MLP block with a bias of large gradient and a scale that stays replicated."""

    width: int = 16

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm()(x)
        h = nn.gelu(nn.Dense(2 * self.width)(h))
        return x + nn.Dense(self.width)(h), None


class Model(nn.Module):
    """Dense, three blocks (a scan or a loop), Dense; ``wrap`` is applied to each part, but not to the model."""

    wrap: Callable = plain
    scan: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        x = self.wrap(nn.Dense)(16)(x)
        block = self.wrap(Block)
        block = nn.remat(block) if self.remat else block
        if self.scan:
            x, _ = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(name="blocks")(
                x, None
            )
        else:
            for i in range(3):
                x, _ = block(name=f"block_{i}")(x)
        return self.wrap(nn.Dense)(4)(x)


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns standard normal values of JAX's float dtype, drawn with NumPy: JAX compiles a program for each shape."""
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.result_type(float))


def integers(seed: int, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Returns integers from ``low`` to ``high - 1``, of JAX's integer dtype, drawn with NumPy as in ``normal``."""
    return np.random.default_rng(seed).integers(low, high, shape).astype(jnp.result_type(int))


def data(batch: int = 16, features: int = 8, seed: int = 1):
    """Returns inputs [b, 8], targets [b, 4] and uneven weights [b], as NumPy arrays.

    Examples differ in scale, so that the mean over a shard differs from the mean over the batch.
    """
    rows = np.arange(batch)
    x = normal(seed, (batch, features))
    scale = (1 + rows % 7)[:, None].astype(x.dtype) / 4
    weight = np.where(rows % 5 < 2, 1 + rows, 0).astype(x.dtype)
    return {"x": x * scale, "y": normal(seed + 1000, (batch, 4)), "weight": weight}


def bits_equal(one: Any, other: Any) -> bool:
    """Returns whether two trees of arrays are equal in every bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def mean_loss(params, apply_fn, batch, rng=None):
    """Returns the mean squared error over the local batch."""
    del rng
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)


def weighted_loss(params, apply_fn, batch, rng=None):
    """Returns (weighted sum of errors, sum of weights) over the local batch."""
    del rng
    error = jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"])


# An optimizer that leaves parameters unchanged, and whose state is the gradients of the last step.
KEPT = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (updates, updates)
)


def train_on_one_device(model, tx, params, loss_fn, batch, steps: int = 1):
    """Returns parameters, optimizer state and losses after ``steps``; ``loss_fn`` returns a mean, or (sum, weight)."""

    def mean(params):
        loss = loss_fn(params, model.apply, batch, None)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    @jax.jit
    def update(params, opt_state):
        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(steps):
        params, opt_state, loss = update(params, opt_state)
        losses.append(float(loss))
    return params, opt_state, losses


def gradients_are_those_of_one_device(model, plain_model, loss_fn, mesh, axes, *batch, check_vma):
    """Asserts that initial values and gradients on the mesh equal those on one device; returns the boxed parameters."""
    start = jax.jit(plain_model.init)(jax.random.key(0), *batch)["params"]
    state = create_train_state(model, KEPT, mesh, jax.random.key(0), *batch, batch_axes=axes, allow_replicated=True)
    params = jax.tree.map(jnp.copy, state.params)
    assert_same_params(params, start, 1e-6)
    step = make_train_step(loss_fn, mesh, axes, check_vma=check_vma, allow_replicated=True)
    inputs = batch[0] if len(batch) == 1 else batch
    grads = train_on_one_device(plain_model, KEPT, unbox(start), loss_fn, inputs)[1]
    assert_same_params(step(state, inputs, jax.random.key(0))[0].opt_state, grads)
    return params


def assert_same_params(got: Any, want: Any, tolerance: float = FLOAT32_ROUNDING) -> None:
    """Asserts that every leaf agrees within ``tolerance``, relative to the largest entry of the leaf.

    A leaf whose true value vanishes is compared relative to the largest entry of the tree, because its entries are
    rounding errors.
    """
    got, want = unbox(got), unbox(want)
    paths, expected = (
        {path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(t)[0]} for t in (got, want)
    )
    assert paths == expected, f"further leaves: {sorted(paths - expected)}, missing: {sorted(expected - paths)}"
    structures = jax.tree.structure(got), jax.tree.structure(want)
    assert structures[0] == structures[1], "unlike structures: {} and {}".format(*structures)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(jax.tree.map(np.asarray, want)) if leaf.size)
    for (path, w), g in zip(jax.tree_util.tree_flatten_with_path(want)[0], jax.tree.leaves(got), strict=True):
        w, g = np.asarray(w, np.float64), np.asarray(g, np.float64)
        largest = np.abs(w).max(initial=0)
        largest = scale if largest < 1e-6 * scale else largest
        worst = np.abs(g - w).max(initial=0)
        assert worst <= tolerance * largest, f"{path_string(path)}: off by {worst:.3g}, largest entry {largest:.3g}"


def split_share(params: Any) -> float:
    """Returns the share of the values of parameters that are split over devices."""
    leaves = [leaf_of(leaf) for _, leaf in leaves_with_path(params)]
    return sum(leaf.value.size for leaf in leaves if leaf.axes) / sum(leaf.value.size for leaf in leaves)


def bits(tree: Any) -> Any:
    """Copies every leaf to a NumPy array, PRNG keys as their key data; later steps may donate the leaves."""

    def plain_array(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(plain_array, tree)


def differing_leaves(got: Any, want: Any) -> list[str]:
    """Returns a phrase for each leaf whose dtype, shape or bits differ, with its path; boxes of leaves may differ.

    Or a single phrase with the paths that only one of the trees has.
    """
    paths_and_leaves = jax.tree_util.tree_flatten_with_path(bits(want))[0]
    paths, of_got = (
        [path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]] for tree in (want, got)
    )
    if alone := sorted(set(paths) ^ set(of_got)):
        return [f"leaves of one of the trees alone: {', '.join(alone)}"]
    found = []
    for (path, w), g in zip(paths_and_leaves, jax.tree.leaves(bits(got)), strict=True):
        if (g.dtype, g.shape) != (w.dtype, w.shape):
            found.append(f"{path_string(path)}: {g.dtype}{list(g.shape)} in place of {w.dtype}{list(w.shape)}")
        elif g.tobytes() != w.tobytes():
            bytes_of_entries = [np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, -1) for x in (g, w)]
            (others,) = np.nonzero(np.any(bytes_of_entries[0] != bytes_of_entries[1], axis=1))
            first = f"{g.ravel()[others[0]]} in place of {w.ravel()[others[0]]}"
            found.append(f"{path_string(path)}: {len(others)} of {g.size} entries, the first {first}")
    return found


def assert_same_bits(got: Any, want: Any) -> None:
    """Asserts that the leaves of two trees have the same dtypes, shapes and bits; the error names those that differ."""
    wrong = differing_leaves(got, want)
    assert not wrong, f"these leaves differ: {'; '.join(wrong)}"


def assert_each_leaf(check: Callable, got: Any, want: Any) -> None:
    """Applies ``check(got, want, err_msg=path)``, an assertion of ``np.testing``, to the leaves of two equal trees."""
    jax.tree_util.tree_map_with_path(lambda path, g, w: check(g, w, err_msg=path_string(path)), got, want)


def equations(jaxpr: Any, within: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the equations of a jaxpr and of nested jaxprs, each with the names of the enclosing primitives."""
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.append((within, eqn))
        name, params = name_and_params(eqn)
        for param in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(param, "eqns") or hasattr(param, "jaxpr"):
                found += equations(param, (*within, name))
    return found


def bytes_by_axis(plan, axis_sizes):
    """Computes the bytes over each axis in one gather of every leaf of a plan, stage by stage.

    A lookup table is excluded, because only its looked-up rows are sent.
    """
    load = dict.fromkeys(axis_sizes, 0.0)
    for row in (row for row in plan.rows if not row.row_bytes):
        axes = next((entry_axes(entry) for entry in row.names if entry), ())
        piece = np.prod(row.shape) / np.prod([axis_sizes[axis] for axis in axes])
        for axis in reversed(axes):
            load[axis] += piece * (axis_sizes[axis] - 1)
            piece *= axis_sizes[axis]
    return load


def as_called(text: str) -> str:
    """Inlines each function of a StableHLO text once per call, because equal leaves share communicating functions."""
    functions = dict(re.findall(r"func\.func \w+ @(\w+)\((.*?)(?=func\.func|\Z)", text, re.DOTALL))

    def body(name: str) -> str:
        return functions[name] + "".join(map(body, re.findall(r"call @(\w+)\(", functions[name])))

    return body("main")


def count_collectives(text: str) -> int:
    """Counts the collectives in StableHLO or in compiled HLO (asynchronous too); several operands count once."""
    return len(
        re.findall(
            rf"stablehlo\.(?:{KINDS})\b|\s(?:{KINDS})(?:-start)?\(", as_called(text) if "func.func" in text else text
        )
    )


def blocks_of(page: Path, language: str = "python") -> list[str]:
    """Returns the code blocks of a page in ``language``, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
