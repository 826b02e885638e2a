"""Layouts of inference servers, of models of the shapes of Llama and Mixtral: there and back in every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import assert_same_bits, mesh_of
from xlstm_jax.distributed import export_safetensors
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
    to_layout,
)

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, EXPERTS, VOCABULARY = 2, 16, 4, 2, 8, 24, 4, 32
ATTENTION = {
    r"blocks/attn/(q|k|v)/kernel": Stored(r"model.layers.{layer}.self_attn.\1_proj.weight", "d h w -> (h w) d"),
    r"blocks/attn/o/kernel": Stored(r"model.layers.{layer}.self_attn.o_proj.weight", "h w d -> d (h w)"),
    r"embed/embedding": "model.embed_tokens.weight",
    r"norm/scale": "model.norm.weight",
}
LLAMA_NAMES = ATTENTION | {
    r"blocks/mlp/(\w+)/kernel": Stored(r"model.layers.{layer}.mlp.\1_proj.weight", "i o -> o i"),
}
QKV = Joined(
    (r"(.+)\.q_proj\.weight", r"\1.k_proj.weight", r"\1.v_proj.weight"),
    r"\1.qkv_proj.weight",
)
# As vLLM's Llama has its parameters.
LLAMA = [
    QKV,
    Joined((r"(.+)\.gate_proj\.weight", r"\1.up_proj.weight"), r"\1.gate_up_proj.weight"),
    Repeated("lm_head.weight", "model.embed_tokens.weight"),
]
MIXTRAL_NAMES = ATTENTION | {
    rf"blocks/moe/expert_(\d+)/w{n}/kernel": Stored(
        rf"model.layers.{{layer}}.block_sparse_moe.experts.\1.w{n}.weight", "i o -> o i"
    )
    for n in (1, 2, 3)
}
# As vLLM's Mixtral: w1 and w3 of an expert joined, and the experts stacked.
MIXTRAL = [
    QKV,
    Joined((r"(.+\.experts\.\d+)\.w1\.weight", r"\1.w3.weight"), r"\1.w13.weight"),
    Stacked(r"(.+\.experts)\.(?P<n>\d+)\.w13\.weight", r"\1.w13_weight"),
    Stacked(r"(.+\.experts)\.(?P<n>\d+)\.w2\.weight", r"\1.w2_weight"),
]


def params_of(model):
    """Flax's parameters in bfloat16, with the layers of a scan as first dim."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(jnp.bfloat16)

    kv = (LAYERS, WIDTH, KV_HEADS, HEAD)
    attention = {
        "q": {"kernel": normal(LAYERS, WIDTH, HEADS, HEAD)},
        "k": {"kernel": normal(*kv)},
        "v": {"kernel": normal(*kv)},
        "o": {"kernel": normal(LAYERS, HEADS, HEAD, WIDTH)},
    }
    up, down = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
    if model == "llama":
        mlp = {"mlp": {name: {"kernel": normal(*(down if name == "down" else up))} for name in ("gate", "up", "down")}}
    else:
        experts = [{f"w{n}": {"kernel": normal(*(down if n == 2 else up))} for n in (1, 2, 3)} for _ in range(EXPERTS)]
        mlp = {"moe": {f"expert_{i}": expert for i, expert in enumerate(experts)}}
    return {
        "embed": {"embedding": normal(VOCABULARY, WIDTH)},
        "norm": {"scale": normal(WIDTH)},
        "blocks": {"attn": attention} | mlp,
    }


def expected(model, params):
    """The tensors of the reader, written out by hand."""
    blocks, found = params["blocks"], {}
    found["model.embed_tokens.weight"] = params["embed"]["embedding"]
    found["model.norm.weight"] = params["norm"]["scale"]
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        q, k, v = (blocks["attn"][n]["kernel"][i].reshape(WIDTH, -1).T for n in "qkv")
        found[f"{at}.self_attn.qkv_proj.weight"] = np.concatenate([q, k, v])
        found[f"{at}.self_attn.o_proj.weight"] = blocks["attn"]["o"]["kernel"][i].reshape(-1, WIDTH).T
        if model == "llama":
            gate, up, down = (blocks["mlp"][n]["kernel"][i].T for n in ("gate", "up", "down"))
            found[f"{at}.mlp.gate_up_proj.weight"] = np.concatenate([gate, up])
            found[f"{at}.mlp.down_proj.weight"] = down
        else:
            experts = [blocks["moe"][f"expert_{e}"] for e in range(EXPERTS)]
            w1, w2, w3 = ([expert[f"w{n}"]["kernel"][i].T for expert in experts] for n in (1, 2, 3))
            pairs = [np.concatenate(pair) for pair in zip(w1, w3, strict=True)]
            found[f"{at}.block_sparse_moe.experts.w13_weight"] = np.stack(pairs)
            found[f"{at}.block_sparse_moe.experts.w2_weight"] = np.stack(w2)
    if model == "llama":
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


CASES = {"llama": (LLAMA_NAMES, LLAMA), "mixtral": (MIXTRAL_NAMES, MIXTRAL)}


@pytest.mark.parametrize("model", CASES)
def test_publish_writes_the_layout_of_the_reader_and_from_layout_inverts_to_layout(model, tmp_path):
    names, layout = CASES[model]
    params = params_of(model)
    split = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh_of(2, 4), P(*[None] * (x.ndim - 1), "fsdp"))), params
    )
    publish(split, tmp_path / "reader", names=names, layout=layout)
    got = apply_publication({}, tmp_path / "reader").arrays
    assert_same_bits(got, expected(model, params))
    publish(split, tmp_path / "model", names=names)
    plain = apply_publication({}, tmp_path / "model").arrays
    assert not plain.keys() >= got.keys()  # guard: the layout has changed something
    back = from_layout(got, layout, {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in plain.items()})
    assert_same_bits(back, plain)
    assert_same_bits(to_layout(back, layout), got)


def test_stacked_parts_are_in_the_order_of_their_numbers():
    """Of twelve parts: by their names part 10 comes before part 2."""
    parts = {f"expert_{n}": np.full(2, n) for n in (3, 11, 0, 7, 10, 1, 2, 9, 4, 8, 5, 6)}
    stacked = to_layout(parts, [Stacked(r"expert_(?P<n>\d+)", "experts")])["experts"]
    assert stacked[:, 0].tolist() == list(range(12))


def test_delta_publication_uses_the_layout_and_changes_only_affected_tensors(tmp_path):
    params = params_of("llama")
    publish(params, tmp_path, names=LLAMA_NAMES, layout=LLAMA)
    arrays = apply_publication({}, tmp_path).arrays
    params["blocks"]["attn"]["k"]["kernel"][1, 3, 0, 2] += 1
    publish(params, tmp_path, names=LLAMA_NAMES, layout=LLAMA, since=1)
    got = apply_publication(arrays, tmp_path).arrays
    assert_same_bits(got, expected("llama", params))
    assert [name for name in got if got[name] is not arrays[name]] == ["model.layers.1.self_attn.qkv_proj.weight"]


@pytest.mark.parametrize("count, dim", [(2, 0), (3, 1), (3, 2)])
def test_joined_concatenates_parts_of_different_sizes_along_any_dim(count, dim):
    rng = np.random.default_rng(0)
    arrays = {
        f"{layer}.{part}": rng.normal(size=[(2, 3, 4), (2, 3, 4 + part)][dim == 2] if dim else (2 + part, 3, 4))
        for layer in "ab"
        for part in range(count)
    }
    layout = [Joined((r"(.)\.0", *[rf"\1.{part}" for part in range(1, count)]), r"\1.all", dim)]
    got = to_layout(arrays, layout)
    want = {f"{x}.all": np.concatenate([arrays[f"{x}.{i}"] for i in range(count)], dim) for x in "ab"}
    assert_same_bits(got, want)
    assert_same_bits(from_layout(got, layout, arrays), arrays)


@pytest.mark.parametrize(
    "layout, message",
    [
        ([Joined(("a", "x"), "ax")], r"'a' is to be joined with 'x', which the model has not"),
        (
            [Joined(("a", "b"), "ab", 0)],
            r"'a', 'b' of float32\[2, 3\], float32\[2, 4\] do not fit together",
        ),
        ([Joined(("a", "b"), "ab", 5)], r"do not fit together along dim 5"),
        ([Joined(("a", "c"), "b", 1)], r"two tensors would have the name 'b'"),
        ([Stacked(r"e(?P<n>\d)", "e")], r"the parts of 'e' have the numbers \[0, 2\], not 0, 1"),
        ([Repeated("t", "x")], r"'t' is to repeat 'x', which the model has not"),
        (
            [Divided("b", ("b0", "b1"), (1, 2))],
            r"cannot be split into 2 parts of sizes \[1, 2\] along dim 0. Sizes",
        ),
        (
            [Divided("b", ("b0", "b1"), dim=2)],
            r"cannot be split into 2 parts of sizes \[0, 0\] along dim 2. Sizes",
        ),
        ([Divided("b", ("b0", "b1", "b2"), dim=1)], r"cannot be split into 3 parts of sizes \[1, 1, 1\] along dim 1"),
        (
            [Joined(("a", "c"), "ac"), Unstacked("ac", "ac{n}")],
            r"'ac', float32\[4, 3\], cannot be split into parts along its first dim. Divide it before it is joined",
        ),
        ([Unstacked("a", "a")], r"two tensors would have the name 'a'"),
    ],
    ids=["missing", "shapes", "dim", "name", "numbers", "repeated", *["sizes", "no dim", "unequal", "joined", "n"]],
)
def test_publish_raises_for_a_layout_inconsistent_with_the_tensors(layout, message, tmp_path):
    shapes = {"a": (2, 3), "b": (2, 4), "c": (2, 3), "e0": (1,), "e2": (1,)}
    with pytest.raises(ValueError, match=message):
        publish({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path, layout=layout)


def test_from_layout_raises_for_tensors_inconsistent_with_the_layout():
    like = {"a": np.zeros((2, 3)), "b": np.zeros((1, 3))}
    layout = [Joined(("a", "b"), "ab"), Repeated("again", "ab")]
    arrays = to_layout(like, layout)
    with pytest.raises(ValueError, match=r"'again', 'x' are tensors of the layout or of the arrays, but not of both"):
        from_layout({"ab": arrays["ab"], "x": np.zeros(1)}, layout, like)
    with pytest.raises(ValueError, match=r"the tensor 'ab' is float64\[2, 3\], and float64\[3, 3\] by the model's"):
        from_layout(arrays | {"ab": np.zeros((2, 3))}, layout, like)
    with pytest.raises(ValueError, match=r"'again' repeats 'a', and its values differ"):
        from_layout(arrays | {"again": arrays["ab"] + 1}, layout, like)


def test_import_in_layout_raises_for_files_inconsistent_with_the_layout(tmp_path):
    like = {"ab": np.arange(6.0).reshape(3, 2), "on": np.array([True, False])}
    layout = [Divided("ab", ("a", "b"), (1, 2)), Repeated("again", "b")]
    publish(like, tmp_path / "right", layout=layout)
    assert_same_bits(import_in_layout(tmp_path / "right", like, layout), like)
    right = apply_publication({}, tmp_path / "right").arrays
    changes = {
        "it has no 'again'": {"again": None},
        "it has 'x', which the layout has not": {"x": np.zeros(1)},
        r"'b' is \[2, 3\] in the file, and \[2, 2\] by the layout": {"b": np.zeros((2, 3))},
        "the parts of 'ab' have different dtypes: 'a' is float64, and 'b' is float32": {"b": np.zeros((2, 2), "f4")},
        "'again' repeats 'ab', and its values differ": {"again": right["again"] + 1},
    }
    for number, (message, change) in enumerate(changes.items()):
        folder = tmp_path / str(number)
        export_safetensors({name: x for name, x in (right | change).items() if x is not None}, folder)
        with pytest.raises(ValueError, match=message):
            import_in_layout(folder, like, layout)


@pytest.mark.parametrize("repeated_first", [True, False])
def test_a_tensor_that_is_split_and_repeated_has_equal_values_in_all_places(repeated_first, tmp_path):
    like = {"ab": np.arange(6.0).reshape(3, 2)}
    split = Divided("ab", ("a", "b"), (1, 2))
    layout = [Repeated("again", "ab"), split] if repeated_first else [split, Repeated("again", "b")]
    arrays = to_layout(like, layout)
    again = like["ab"][0 if repeated_first else 1 :]
    assert_same_bits(arrays, {"a": like["ab"][:1], "b": like["ab"][1:], "again": again})
    assert_same_bits(from_layout(arrays, layout, like), like)
    publish(like, tmp_path, layout=layout)
    assert_same_bits(import_in_layout(tmp_path, like, layout), like)
    with pytest.raises(ValueError, match=r"repeats 'ab', and its values differ"):
        from_layout(arrays | {"again": arrays["again"] + 1}, layout, like)


def test_a_tensor_of_one_dim_is_taken_apart_to_scalars():
    like, layout = {"w": np.arange(3)}, [Unstacked("w", "w{n}")]
    arrays = to_layout(like, layout)
    assert [array.shape for array in arrays.values()] == [()] * 3
    assert_same_bits(from_layout(arrays, layout, like), like)
