"""Tests of the collectives of a step: counted per leaf in the lowered program; one device needs no collectives."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support import Model, as_called, data, fsdp, mean_loss, on_mesh
from xlstm_jax.distributed import DeviceMeshManager, init_sharded, partition_specs, unbox, value_and_grad
from xlstm_jax.distributed.data_parallel.leaf import is_box
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

KEY, BATCH = jax.random.key(0), data()
BOTH_MODES = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])


def collectives(text):
    """Returns the collectives of a StableHLO text as (kind, shape of the first result)."""
    flat = as_called(text).replace("\n", " ")
    found = re.findall(r'"stablehlo\.(all_gather|reduce_scatter|all_reduce)"\(.*?->\s*\(?tensor<([^>]*)>', flat)
    assert len(found) == len(re.findall(r"stablehlo\.(?:all_gather|reduce_scatter|all_reduce)\"", flat))
    return [(kind, tuple(int(n) for n in re.findall(r"(\d+)x", shape))) for kind, shape in found]


def lowered(shape, axis_name, check_vma, *, made_by=lambda make: make(), around=lambda model: model, **options):
    """Returns the boxed variables, or their shapes by ``jax.eval_shape``, and the lowered loss and gradient."""
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    mesh, axes = DeviceMeshManager.create_device_mesh(shape, devices), tuple(shape)
    model = around(Model)(fsdp(axis_name=axis_name), **{"scan": False} | options)
    variables = made_by(lambda: init_sharded(model, mesh, KEY, BATCH["x"], batch_axes=axes))
    specs = partition_specs(variables, mesh)
    split = tuple(axis for axis in axes if shape[axis] > 1)
    fn = value_and_grad(lambda v, b: mean_loss(v["params"], model.apply, b), axes)
    return variables, on_mesh(fn, mesh, check_vma, (specs, P(split)), (P(), specs)).lower(variables, BATCH)


@pytest.mark.one_in(5)
@BOTH_MODES
@pytest.mark.parametrize("remat", [False, True], ids=["keep", "remat"])
@pytest.mark.parametrize(
    "shape, axis_name, stages",
    [({"fsdp": 8}, "fsdp", 1), ({"dp": 2, "fsdp": 4}, "fsdp", 1), ({"dp": 2, "fsdp": 4}, ("dp", "fsdp"), 2)],
    ids=["fsdp8", "dp2xfsdp4", "both axes"],
)
def test_each_sharded_leaf_has_a_single_gather_and_a_single_reduce_scatter(shape, axis_name, stages, remat, check_vma):
    variables, program = lowered(shape, axis_name, check_vma, remat=remat)
    count = Counter(kind for kind, _ in collectives(program.as_text()))
    boxed = [path for path, leaf in leaves_with_path(variables) if is_box(leaf)]
    in_blocks = [path for path in boxed if "block" in path]
    assert len(in_blocks) == 9 and len(boxed) == 11
    # Each sharded leaf is used once. Blocks under remat gather again in the backward pass, the ends do not.
    assert count["all_gather"] == stages * (len(boxed) + (len(in_blocks) if remat else 0))
    assert count["reduce_scatter"] == stages * len(boxed)


@pytest.mark.one_in(3)
@BOTH_MODES
@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"dp": 2, "fsdp": 4}], ids=["fsdp8", "dp2xfsdp4"])
def test_all_reduce_runs_only_for_loss_replicated_leaves_and_replicas_of_shards(shape, check_vma):
    variables, program = lowered(shape, "fsdp", check_vma)
    reduced = Counter(dims for kind, dims in collectives(program.as_text()) if kind == "all_reduce")
    leaves = leaves_with_path(variables)
    whole = Counter(leaf.shape for _, leaf in leaves if not is_box(leaf))
    shards = Counter(
        leaf.value.sharding.shard_shape(leaf.value.shape) for _, leaf in leaves if is_box(leaf) and "dp" in shape
    )
    # Expected: the loss, every replicated leaf over all axes, and (with replicas) every shard over dp.
    assert reduced == Counter([()]) + whole + shards
    assert sum(is_box(leaf) for _, leaf in leaves) == 11  # guard: leaves are sharded


@pytest.mark.parametrize("check_vma, around", [(True, lambda model: model), (False, fsdp)], ids=["blocks", "all too"])
def test_nn_scan_gathers_a_single_layer_at_a_time(check_vma, around):
    """Each layer of a scan is gathered separately, also if the full model is wrapped around wrapped modules."""
    variables, program = lowered(
        {"fsdp": 8}, "fsdp", check_vma, scan=True, remat=True, around=around, made_by=jax.eval_shape
    )
    gathered = [dims for kind, dims in collectives(program.as_text()) if kind == "all_gather"]
    kernel = variables["params"]["blocks"]["Dense_0"]["kernel"].value.shape
    assert kernel == (3, 16, 32)
    assert (32, 16) in gathered  # the gathered dim comes first
    assert sorted(kernel) not in [sorted(dims) for dims in gathered]
    in_blocks = [path for path, leaf in leaves_with_path(variables) if is_box(leaf) and "blocks" in path]
    assert len(gathered) == 2 * len(in_blocks) + 2 or around is fsdp  # fsdp also splits stacked biases


@BOTH_MODES
def test_xla_compiles_the_lowered_collectives_and_adds_none(check_vma):
    """XLA compiles the lowered collectives and adds no further collective."""
    _, program = lowered({"dp": 2, "fsdp": 4}, "fsdp", check_vma, remat=True)
    compiled = program.compile().as_text()
    count = Counter(kind for kind, _ in collectives(program.as_text()))
    ops = Counter(
        re.findall(r"= .*? (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\(", compiled)
    )
    assert set(ops) <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert ops["all-gather"] <= count["all_gather"] and ops["reduce-scatter"] <= count["reduce_scatter"]
    assert ops["all-reduce"] <= count["all_reduce"] and ops["all-gather"] > 0


def instructions(compiled_text):
    """Returns the number of instructions of each kind in a compiled program."""
    return Counter(re.findall(r"= (?:\([^=]*?\)|\S+) ([a-z][a-z\-]*)\(", compiled_text))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(  # any two of the three in each of their four ways
    "scan, remat, check_vma", [(False, False, True), (False, True, False), (True, False, False), (True, True, True)]
)
def test_mesh_of_a_single_device_compiles_to_the_instructions_of_the_plain_model(scan, remat, check_vma):
    variables, program = lowered({"fsdp": 1}, "fsdp", check_vma, scan=scan, remat=remat)
    assert any(is_box(leaf) for _, leaf in leaves_with_path(variables))
    model, bare = Model(scan=scan, remat=remat), unbox(variables)
    plain = jax.jit(jax.value_and_grad(lambda v, b: mean_loss(v["params"], model.apply, b))).lower(bare, BATCH)
    got, want = (instructions(p.compile().as_text()) for p in (program, plain))
    assert not [kind for kind in got if re.match("all-|reduce-scatter|collective", kind)]
    assert got == want and got["fusion"] > 10  # the same instructions, copies among them


def test_helpers_count_an_all_reduce_in_lowered_and_compiled_text():
    fn = on_mesh(
        lambda x: jax.lax.psum(x, "fsdp"), DeviceMeshManager.create_device_mesh({"fsdp": 8}), True, P("fsdp"), P()
    )
    lowered_text = fn.lower(jnp.ones((8, 2)))
    assert collectives(lowered_text.as_text()) == [("all_reduce", (1, 2))]
    assert instructions(lowered_text.compile().as_text())["all-reduce"] == 1
