"""Publications under the names of transformers: the names and shapes of the documented checkpoints, there and back.

The tables are written from the models' documented state dicts (a linear layer has a weight [out, in], GPT-2's Conv1D
[in, out]); the package safetensors reads the files.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from tests.support import assert_same_bits, mesh_of
from xlstm_jax.distributed.checkpoint import (
    Divided,
    Joined,
    Repeated,
    Stacked,
    Stored,
    Unstacked,
    apply_publication,
    from_layout,
    import_in_layout,
    publish,
)

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, EXPERTS, VOCABULARY = 2, 16, 4, 2, 8, 24, 4, 32
QUERY, KV = HEADS * HEAD, KV_HEADS * HEAD


# ------------------------------------------------------------------------------------------ the documented state dicts


def in_layers(tensors):
    return {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in tensors.items()}


EMBEDDING = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
HEAD_OF_MODEL = {"lm_head.weight": (VOCABULARY, WIDTH)}
NORMS = {"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)}
ATTENTION = {
    "self_attn.q_proj.weight": (QUERY, WIDTH),
    "self_attn.k_proj.weight": (KV, WIDTH),
    "self_attn.v_proj.weight": (KV, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, QUERY),
}
MLP = {
    "mlp.gate_proj.weight": (HIDDEN, WIDTH),
    "mlp.up_proj.weight": (HIDDEN, WIDTH),
    "mlp.down_proj.weight": (WIDTH, HIDDEN),
}
JOINED = {
    "self_attn.qkv_proj.weight": (QUERY + 2 * KV, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, QUERY),
    "mlp.gate_up_proj.weight": (2 * HIDDEN, WIDTH),
    "mlp.down_proj.weight": (WIDTH, HIDDEN),
}
SPARSE = {"block_sparse_moe.gate.weight": (EXPERTS, WIDTH)} | {
    f"block_sparse_moe.experts.{e}.{w}.weight": (WIDTH, HIDDEN) if w == "w2" else (HIDDEN, WIDTH)
    for e in range(EXPERTS)
    for w in ("w1", "w2", "w3")
}
STACKED = {
    "mlp.gate.weight": (EXPERTS, WIDTH),
    "mlp.experts.gate_up_proj": (EXPERTS, 2 * HIDDEN, WIDTH),
    "mlp.experts.down_proj": (EXPERTS, WIDTH, HIDDEN),
}
TABLES = {
    "LlamaForCausalLM": EMBEDDING | HEAD_OF_MODEL | in_layers(NORMS | ATTENTION | MLP),
    "LlamaForCausalLM, tied": EMBEDDING | in_layers(NORMS | ATTENTION | MLP),
    "Phi3ForCausalLM": EMBEDDING | HEAD_OF_MODEL | in_layers(NORMS | JOINED),
    "MixtralForCausalLM": EMBEDDING | HEAD_OF_MODEL | in_layers(NORMS | ATTENTION | SPARSE),
    "MixtralForCausalLM, stacked": EMBEDDING | HEAD_OF_MODEL | in_layers(NORMS | ATTENTION | STACKED),
}


# ------------------------------------------------------------------------------------------------------ models of Flax


def params_of(joined, mixture, tied):
    """Parameters in bfloat16, the layers of a scan first; ``joined``: q, k and v are one kernel, as are gate and up."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(jnp.bfloat16)

    at = (LAYERS, EXPERTS) if mixture else (LAYERS,)
    gate_up = {"gate_up": normal(*at, WIDTH, 2 * HIDDEN)}
    mlp = (gate_up if joined else {w: normal(*at, WIDTH, HIDDEN) for w in ("gate", "up")}) | {
        "down": normal(*at, HIDDEN, WIDTH)
    }
    if mixture:
        mlp = {"experts": mlp, "router": normal(LAYERS, WIDTH, EXPERTS)}
    apart = {"q": normal(LAYERS, WIDTH, HEADS, HEAD)} | {n: normal(LAYERS, WIDTH, KV_HEADS, HEAD) for n in "kv"}
    one = {"qkv": normal(LAYERS, WIDTH, HEADS + 2 * KV_HEADS, HEAD)}
    return {
        "embed": normal(VOCABULARY, WIDTH),
        "norm": normal(WIDTH),
        "blocks": {
            "norms": {"attention": normal(LAYERS, WIDTH), "mlp": normal(LAYERS, WIDTH)},
            "attention": (one if joined else apart) | {"o": normal(LAYERS, HEADS, HEAD, WIDTH)},
            "mlp": mlp,
        },
    } | ({} if tied else {"head": normal(WIDTH, VOCABULARY)})


NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": Stored("lm_head.weight", "d v -> v d"),
    "blocks/norms/attention": "model.layers.{layer}.input_layernorm.weight",
    "blocks/norms/mlp": "model.layers.{layer}.post_attention_layernorm.weight",
    r"blocks/attention/(q|k|v|qkv)": Stored(r"model.layers.{layer}.self_attn.\1_proj.weight", "d h w -> (h w) d"),
    "blocks/attention/o": Stored("model.layers.{layer}.self_attn.o_proj.weight", "h w d -> d (h w)"),
    r"blocks/mlp/experts/(\w+)": Stored(r"model.layers.{layer}.mlp.experts.\1_proj", "e i o -> e o i"),
    r"blocks/mlp/router": Stored("model.layers.{layer}.mlp.gate.weight", "i o -> o i"),
    r"blocks/mlp/(\w+)": Stored(r"model.layers.{layer}.mlp.\1_proj.weight", "i o -> o i"),
}
JOIN = [
    Joined((r"(.+)\.q_proj\.weight", r"\1.k_proj.weight", r"\1.v_proj.weight"), r"\1.qkv_proj.weight"),
    Joined((r"(.+mlp)\.gate_proj\.weight", r"\1.up_proj.weight"), r"\1.gate_up_proj.weight"),
]
SPLIT_QKV = Divided(
    r"(.+)\.qkv_proj\.weight", (r"\1.q_proj.weight", r"\1.k_proj.weight", r"\1.v_proj.weight"), (QUERY, KV, KV)
)
SPLIT = [SPLIT_QKV, Divided(r"(.+mlp)\.gate_up_proj\.weight", (r"\1.gate_proj.weight", r"\1.up_proj.weight"))]
JOIN_EXPERTS = [Joined((r"(.+)\.experts\.gate_proj", r"\1.experts.up_proj"), r"\1.experts.gate_up_proj", 1)]
SPLIT_EXPERTS = [Divided(r"(.+)\.experts\.gate_up_proj", (r"\1.experts.gate_proj", r"\1.experts.up_proj"), dim=1)]
ROUTER = Joined((r"(.+)\.mlp\.gate\.weight",), r"\1.block_sparse_moe.gate.weight")  # of one part: another name
UNSTACK = [
    Unstacked(rf"(.+)\.mlp\.experts\.{name}_proj", rf"\1.block_sparse_moe.experts.{{n}}.{w}.weight")
    for name, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
]
STACK = [
    Stacked(rf"(.+)\.block_sparse_moe\.experts\.(?P<n>\d+)\.{w}\.weight", rf"\1.mlp.experts.{name}_proj")
    for name, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
]
# Table, options of ``params_of`` (joined, mixture, tied), rules from the model's tensors to those of the table.
CASES = {
    "Llama": ("LlamaForCausalLM", (False, False, False), []),
    "Llama, from joined kernels": ("LlamaForCausalLM", (True, False, False), SPLIT),
    "Llama, tied": ("LlamaForCausalLM, tied", (False, False, True), []),
    "Llama, tied, for readers of both": (
        "LlamaForCausalLM",
        (False, False, True),
        [Repeated("lm_head.weight", "model.embed_tokens.weight")],
    ),
    "Phi-3, from kernels apart": ("Phi3ForCausalLM", (False, False, False), JOIN),
    "Phi-3": ("Phi3ForCausalLM", (True, False, False), []),
    "Mixtral": ("MixtralForCausalLM", (False, True, False), [*UNSTACK, ROUTER]),
    "Mixtral, from joined kernels": (
        "MixtralForCausalLM",
        (True, True, False),
        [SPLIT_QKV, *SPLIT_EXPERTS, *UNSTACK, ROUTER],
    ),
    "Mixtral, stacked": ("MixtralForCausalLM, stacked", (False, True, False), JOIN_EXPERTS),
    "Mixtral, stacked, from joined kernels": ("MixtralForCausalLM, stacked", (True, True, False), [SPLIT_QKV]),
}


def matrices(params, layer):
    """The weights [out, in] of a layer, by hand: attention, then the gate, up and down of the MLP or of each expert."""
    block = jax.tree.map(lambda x: x[layer], params["blocks"])
    attention = block["attention"]
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    if "qkv" in attention:
        ends = np.cumsum(list(heads.values()))
        parts = np.split(attention["qkv"], ends[:-1], axis=1)
        attention = attention | dict(zip(heads, parts, strict=True))
    found = {name: attention[name].reshape(WIDTH, -1).T for name in heads}
    found["o"] = attention["o"].reshape(-1, WIDTH).T
    mlp = block["mlp"].get("experts", block["mlp"])
    gate, up = np.split(mlp["gate_up"], 2, -1) if "gate_up" in mlp else (mlp["gate"], mlp["up"])
    return found | {"gate": gate.swapaxes(-1, -2), "up": up.swapaxes(-1, -2), "down": mlp["down"].swapaxes(-1, -2)}


def wanted(table, params):
    """The tensors of a documented state dict, each written out by hand."""

    def value(name):
        if name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            head = params["head"].T if "head" in params else params["embed"]
            return {"model.norm.weight": params["norm"], "lm_head.weight": head}.get(name, params["embed"])
        layer = int(name.split(".")[2])
        of, at = matrices(params, layer), params["blocks"]
        last = name.removesuffix(".weight").rpartition(".")[2]
        if last in ("w1", "w2", "w3"):
            return of[{"w1": "gate", "w2": "down", "w3": "up"}[last]][int(name.split(".experts.")[1].split(".")[0])]
        values = {
            "input_layernorm": at["norms"]["attention"][layer],
            "post_attention_layernorm": at["norms"]["mlp"][layer],
            "qkv_proj": np.concatenate([of["q"], of["k"], of["v"]]),
            "gate_up_proj": np.concatenate([of["gate"], of["up"]], axis=-2),
            "gate": at["mlp"]["router"][layer].T if "router" in at["mlp"] else None,
        }
        return values[last] if last in values else of[last.removesuffix("_proj")]

    return {name: value(name) for name in TABLES[table]}


@pytest.mark.parametrize("case", CASES)
def test_a_published_model_is_that_of_transformers(case, tmp_path):
    """Sharded parameters are published as the documented state dict, and come back by the same rules.

    There: the files have names, shapes and values written out by hand. Back: as tensors of the model, and as
    parameters on another mesh.
    """
    table, options, layout = CASES[case]
    params = params_of(*options)
    split = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh_of(2, 4), P(*[None] * (x.ndim - 1), "fsdp"))), params
    )
    publish(split, tmp_path / "reader", names=NAMES, layout=layout, max_file_bytes=4096)
    index = json.loads((tmp_path / "reader" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1  # guard: the index is needed
    got = {name: tensor for file in files for name, tensor in load_file(tmp_path / "reader" / file).items()}
    assert {name: tensor.shape for name, tensor in got.items()} == TABLES[table]
    assert index["weight_map"].keys() == got.keys()
    assert_same_bits(got, wanted(table, params))
    publish(split, tmp_path / "model", names=NAMES)
    of_model = apply_publication({}, tmp_path / "model").arrays
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in of_model.items()}
    assert_same_bits(from_layout(got, layout, shapes), of_model)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh_of(4, 2), x.sharding.spec)), split
    )
    imported = import_in_layout(tmp_path / "reader", like, layout, names=NAMES)
    assert jax.tree.map(lambda x: x.sharding, imported) == jax.tree.map(lambda x: x.sharding, like)
    assert_same_bits(imported, params)


def test_stacking_is_the_inverse_of_unstacking(tmp_path):
    params = params_of(joined=False, mixture=True, tied=False)
    publish(params, tmp_path / "apart", names=NAMES, layout=UNSTACK)
    apart = apply_publication({}, tmp_path / "apart").arrays
    publish(apart, tmp_path / "stacked", layout=STACK)
    publish(params, tmp_path / "model", names=NAMES)
    model = apply_publication({}, tmp_path / "model").arrays
    assert_same_bits(apply_publication({}, tmp_path / "stacked").arrays, model)
    assert len(apart) > len(model)  # guard: experts were unstacked


def test_a_delta_of_one_expert_is_in_the_tensor_of_this_expert(tmp_path):
    params, layout = params_of(joined=True, mixture=True, tied=False), CASES["Mixtral, from joined kernels"][2]
    publish(params, tmp_path, names=NAMES, layout=layout)
    arrays = apply_publication({}, tmp_path).arrays
    params["blocks"]["mlp"]["experts"]["gate_up"][1, 2, 3, HIDDEN + 5] += 1
    publish(params, tmp_path, names=NAMES, layout=layout, since=1)
    got = apply_publication(arrays, tmp_path).arrays
    assert_same_bits(got, wanted("MixtralForCausalLM", params))
    changed = [name for name in got if got[name] is not arrays[name]]
    assert changed == ["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
