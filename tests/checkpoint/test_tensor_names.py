"""Tests of files with names and layouts of other libraries, both directions, on a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from safetensors.numpy import load_file, save_file

from tests.support import AXES, assert_same_bits, fsdp, mesh_of
from xlstm_jax.distributed import export_safetensors, import_safetensors, init_sharded, unbox
from xlstm_jax.distributed.checkpoint import TRANSFORMERS, Stored


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q = fsdp(nn.DenseGeneral)((2, 8), name="q")(x)
        return x + fsdp(nn.DenseGeneral)(16, axis=(-2, -1), name="out")(q), None


class Model(nn.Module):
    """An embedding table, a tied head, and three layers in a scan."""

    @nn.compact
    def __call__(self, tokens):
        table = fsdp(nn.Embed)(32, 16, name="embed")
        layers = nn.scan(Layer, length=3, variable_axes={"params": 0}, split_rngs={"params": True})
        return table.attend(layers(name="blocks")(table(tokens), None)[0])


NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "blocks/q/kernel": Stored("model.layers.{layer}.q_proj.weight", "d h w -> (h w) d"),
    "blocks/out/kernel": Stored("model.layers.{layer}.o_proj.weight", "h w d -> d (h w)"),
    r"blocks/(q|out)/bias": Stored(r"model.layers.{layer}.\1.bias", ("o -> o", "h w -> (h w)")),
}


@pytest.fixture(scope="module")
def params():
    return init_sharded(Model(), mesh_of(2, 4), jax.random.key(0), jnp.zeros((8, 4), jnp.int32), batch_axes=AXES)[
        "params"
    ]


def test_scanned_layers_export_as_a_tensor_per_layer_and_import_on_another_mesh(params, tmp_path):
    export_safetensors(params, tmp_path, names=NAMES)
    tensors, whole = load_file(tmp_path / "model.safetensors"), jax.tree.map(np.asarray, unbox(params))
    assert len(tensors) == 1 + 3 * 4
    for layer in range(3):
        q, out = whole["blocks"]["q"]["kernel"][layer], whole["blocks"]["out"]["kernel"][layer]
        assert np.array_equal(tensors[f"model.layers.{layer}.q_proj.weight"], q.reshape(16, 16).T)
        assert np.array_equal(tensors[f"model.layers.{layer}.o_proj.weight"], out.reshape(16, 16).T)
    assert np.array_equal(tensors["model.embed_tokens.weight"], whole["embed"]["embedding"])

    target = init_sharded(Model(), mesh_of(1, 8), jax.random.key(1), jnp.zeros((8, 4), jnp.int32), batch_axes=AXES)
    again = import_safetensors(tmp_path, target["params"], names=NAMES)
    assert again["blocks"]["q"]["kernel"].value.sharding.mesh.shape["fsdp"] == 8
    assert jax.tree.structure(unbox(again)) == jax.tree.structure(whole)
    assert_same_bits(unbox(again), whole)


def test_import_widens_bfloat16_and_skips_tensors_matched_by_ignore(params, tmp_path):
    export_safetensors(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), unbox(params)), tmp_path, names=NAMES)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.rotary_emb.inv_freq": np.ones(4, np.float32)}, file)
    with pytest.raises(ValueError, match=r"it has .*inv_freq.*, which the parameters have not"):
        import_safetensors(tmp_path, params, names=NAMES)
    again = import_safetensors(tmp_path, params, names=NAMES, ignore=r".*\.inv_freq")
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16).astype(np.float32), unbox(params))
    assert_same_bits(again, rounded)


def test_tied_leaves_import_from_a_shared_tensor_and_export_raises(tmp_path):
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    save_file({"tied.weight": table}, tmp_path / "model.safetensors")
    names = {"embed/embedding": "tied.weight", "head/kernel": Stored("tied.weight", "d v -> v d")}
    tree = {"embed": {"embedding": np.zeros((3, 2), "float32")}, "head": {"kernel": np.zeros((2, 3), "float32")}}
    both = import_safetensors(tmp_path, tree, names=names)
    assert np.array_equal(both["embed"]["embedding"], table) and np.array_equal(both["head"]["kernel"], table.T)
    with pytest.raises(ValueError, match=r"'head/kernel' and 'embed/embedding' would both be the tensor 'tied.weight'"):
        export_safetensors(both, tmp_path / "again", names=names)


def test_kernel_with_a_rank_outside_all_choices_is_stored_unchanged(tmp_path):
    """A kernel of one dim is stored unchanged beside choices for two and more dims."""
    kernel = np.arange(3.0)
    export_safetensors({"a": {"kernel": kernel}}, tmp_path, names=TRANSFORMERS)
    (stored,) = load_file(tmp_path / "model.safetensors").items()
    assert stored[0] == "a.weight" and np.array_equal(stored[1], kernel)
    assert np.array_equal(
        import_safetensors(tmp_path, {"a": {"kernel": kernel}}, names=TRANSFORMERS)["a"]["kernel"], kernel
    )


def test_import_raises_for_a_shape_mismatch_with_leaf_tensor_and_both_shapes(tmp_path):
    export_safetensors({"a": {"kernel": np.zeros((4, 2))}}, tmp_path, names=TRANSFORMERS)
    problem = "'a/kernel' is float64[2, 4] as 'a.weight' in the file, and float64[5, 2] in abstract_params"
    with pytest.raises(ValueError, match=re.escape(problem.replace("float64[5, 2]", "float64[2, 5]"))):
        import_safetensors(tmp_path, {"a": {"kernel": np.zeros((5, 2))}}, names=TRANSFORMERS)


def test_convolution_kernel_is_stored_with_the_spatial_dims_last(tmp_path):
    kernel = np.random.default_rng(0).normal(size=(3, 5, 2, 4))
    export_safetensors({"conv": {"kernel": kernel}}, tmp_path, names=TRANSFORMERS)
    stored = load_file(tmp_path / "model.safetensors")["conv.weight"]
    assert stored.shape == (4, 2, 3, 5) and np.array_equal(stored, np.einsum("yxio->oiyx", kernel))
    again = import_safetensors(tmp_path, {"conv": {"kernel": np.zeros_like(kernel)}}, names=TRANSFORMERS)
    assert np.array_equal(again["conv"]["kernel"], kernel)


def test_leaf_sharded_along_the_layer_dim_imports_from_a_tensor_per_layer(tmp_path):
    names = {"(.+)/kernel": Stored(r"\1.{layer}.weight", "i o -> o i")}
    kernel = np.random.default_rng(0).normal(size=(8, 2, 4)).astype(np.float32)
    export_safetensors({"a": {"kernel": kernel}}, tmp_path, names=names)
    sharding = jax.NamedSharding(mesh_of(1, 8), jax.P("fsdp"))
    like = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=sharding)
    again = import_safetensors(tmp_path, {"a": {"kernel": like}}, names=names)["a"]["kernel"]
    assert again.sharding == sharding and np.array_equal(again, kernel)
