"""An operation's name tells its module and direction: on names of real programs of both JAX releases, and by models."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import traverse_util
from jax.sharding import PartitionSpec as P

from tests.models import LanguageModel
from tests.support import fsdp, mesh_of, on_mesh
from xlstm_jax.distributed import abstract_train_state, make_train_step, shard_modules, unbox
from xlstm_jax.forecast.hlo.op_names import module_path, module_paths

STEP = "jit(step)/shard_map"
BACK = f"{STEP}/transpose(jvp(LanguageModel))/while/body"

NAMES = {
    # a scanned, rematerialized model: one release writes closed_call, the next eval_jaxpr
    f"{STEP}/jvp(LanguageModel)/while/body/closed_call/blocks/blocks.project/up/dot_general": ("blocks/up", "forward"),
    f"{STEP}/jvp(M)/while/body/eval_jaxpr/blocks/up/dot_general": ("blocks/up", "forward"),
    f"{BACK}/closed_call/checkpoint/rematted_computation/blocks/blocks.norm/mlp_norm/mul": (
        "blocks/mlp_norm",
        "recompute",
    ),
    f"{BACK}/closed_call/checkpoint/blocks/blocks.add/down/dot_general": ("blocks/down", "backward"),
    f"{BACK}/closed_call/checkpoint/blocks/bhtd,bhsd->bhts/dot_general": ("blocks", "backward"),
    f"{BACK}/closed_call/checkpoint/blocks/while/body/closed_call/bhsd,bhse->bhde/transpose": ("blocks", "backward"),
    f"{STEP}/jvp(LanguageModel)/embed/jit(_take)/gather": ("embed", "forward"),
    f"{STEP}/jvp(LanguageModel)/while/body/closed_call/blocks/jit(silu)": ("blocks", "forward"),
    # nn.remat without a scan, and in one: its place is named twice
    "jit(f)/transpose(jvp(MLP))/jvp(MLP)/checkpoint/second/up/dot_general": ("second/up", "backward"),
    "jit(f)/transpose(jvp(loss))/M/stack/jvp(loss)/M/stack/checkpoint/rematted_computation/inner/up/dot_general": (
        "stack/inner/up",
        "recompute",
    ),
    f"{BACK}/closed_call/blocks/blocks/checkpoint/inner/up/dot_general": ("blocks/inner/up", "backward"),
    # the library's scopes, and what lies in no module
    f"{BACK}/closed_call/checkpoint/rematted_computation/gather_params/all_gather": ("", "recompute"),
    f"{STEP}/sync_gradients/psum_invariant": ("", "backward"),
    f"{STEP}/jvp()/reduce_sum": ("", "forward"),
    f"{STEP}/transpose(jvp())/mul;transpose(jvp())/broadcast_in_dim": ("", "backward"),
    f"{STEP}/jvp(M)/while": ("", "forward"),
    f"{STEP}/transpose(jvp(M))/while/cond/lt": ("", "backward"),
    "jit(step)/jit(tree_bias_correction)/pow": ("", "other"),
    "jit(step)/add": ("", "other"),
    f"{STEP}/broadcast.73": ("", "other"),
    STEP: ("", "other"),
    # without their beginning, as the compiler leaves some
    "transpose(jvp(M))/while/body/eval_jaxpr/checkpoint/gather_params/reduce_scatter": ("", "backward"),
    "checkpoint/rematted_computation/blocks/reduce_max": ("blocks", "recompute"),
    "blocks/reduce_max": ("blocks", "other"),
    "broadcast.40": ("", "other"),
    "": ("", "other"),
    # arguments, quoted as in HLO text
    r"state.params[\'blocks\'][\'up\'][\'kernel\'].value": ("", "other"),
    r"batch[\'a/x\']": ("", "other"),
    # programs that are not differentiated; methods; a scope around the loss; branches; modules named as control flow
    "jit(apply)/LanguageModel/head/dot_general": ("head", "forward"),
    "jit(f)/GPT.encode/encoder/Dense_0/dot_general": ("encoder/Dense_0", "forward"),
    "jit(f)/jvp(GPT)/embed.attend/dot_general": ("embed", "forward"),
    "jit(f)/jvp(loss)/GPT/h_0/add": ("h_0", "forward"),
    "jit(f)/vmap(jvp(GPT))/cond/branch_1_fun/h_0/mul": ("h_0", "forward"),
    "jit(f)/jvp(GPT)/cond/while/add": ("cond/while", "forward"),
    "jit(f)/jvp(GPT)/vmap(h_0)": ("h_0", "forward"),  # a last transformation is no primitive
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[-60:] or "empty")
def test_module_path_reads_module_and_direction_from_an_operation_name(name):
    assert module_path(name) == NAMES[name]


def test_module_paths_gives_unnamed_loop_operations_the_module_of_the_loop_body():
    gather = f"{BACK}/closed_call/checkpoint/rematted_computation/gather_params/all_gather"
    store = f"{BACK}/jit(dynamic_update_index_in_dim)/dynamic_update_slice"
    body = [f"{BACK}/closed_call/checkpoint/blocks/{part}/dot_general" for part in ("up", "down")]
    paths = module_paths([gather, store, BACK.removesuffix("/body"), *body])
    assert paths[gather] == ("blocks", "recompute")
    assert paths[store] == paths[BACK.removesuffix("/body")] == ("blocks", "backward")
    assert paths[body[0]] == ("blocks/up", "backward")


def test_module_paths_gives_no_module_in_a_loop_over_several_modules():
    outer = f"{STEP}/while/body"  # minibatches
    names = [f"{outer}/{name}" for name in ("add", "jvp(M)/embed/gather", "jvp(M)/head/dot_general")]
    assert module_paths(names)[names[0]] == ("", "other")


@pytest.mark.parametrize("block", ["transformer", "recurrent"])
def test_module_paths_of_a_compiled_step_match_the_parameter_paths(block):
    """The products of a dense layer lie at the path of its kernel: forward, recomputed and backward."""
    mesh = mesh_of(2, 4)
    model = LanguageModel(block, dim=16, num_layers=2, num_heads=2, remat=True, wrap=fsdp)
    tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32)

    def loss(params, apply_fn, batch, rng):
        del rng
        return jnp.mean(apply_fn({"params": params}, batch) ** 2)

    state = abstract_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), tokens, batch_axes=("dp", "fsdp"))
    step = make_train_step(loss, mesh, batch_axes=("dp", "fsdp"))
    text = step.lower(state, tokens, jax.ShapeDtypeStruct((), jax.random.key(0).dtype)).compile().as_text()
    paths = module_paths(re.findall(r'op_name="([^"]*)"', text))

    found = {place for name, place in paths.items() if name.endswith("dot_general")}
    kernels = {path[:-1] for path in traverse_util.flatten_dict(unbox(state.params)) if path[-1] == "kernel"}
    for kernel in kernels:
        path = "/".join(kernel)
        last = path in ("blocks/down", "head")  # nothing after it needs its output again
        directions = {"forward", "backward"} | (set() if last else {"recompute"})
        assert {direction for place, direction in found if place == path} == directions, path
    gathers = {place for name, place in paths.items() if re.search(r"gather_params/jit\(_whole\)/all_gather$", name)}
    assert ("blocks", "recompute") in gathers
    assert {path for path, _ in found} <= {"/".join(kernel) for kernel in kernels} | {"blocks", ""}


def test_module_paths_of_shard_modules_layers_keep_the_layer_names():
    model = shard_modules(nn.Sequential([nn.Dense(32), nn.Dense(16)]), nn.Dense, "fsdp", min_weight_size=2)

    def loss(params, x):
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    def grads(x):
        return jax.grad(loss)(model.init(jax.random.key(0), x)["params"], x)

    text = on_mesh(grads, mesh_of(1, 8), False, P("fsdp"), P()).lower(jnp.ones((8, 16))).compile().as_text()
    paths = module_paths(re.findall(r'op_name="([^"]*)"', text))
    found = {place for name, (place, _) in paths.items() if name.endswith("dot_general")}
    assert found == {"layers_0", "layers_1"}
