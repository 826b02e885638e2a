"""What is generated on shards is what the plain model would write, byte for byte, whenever weights are gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from benchmarks.generation import make_generate
from benchmarks.models import BLOCKS, LanguageModel
from tests.support import AXES, fsdp, mesh_of
from xlstm_jax.distributed import init_sharded, unbox
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import LOOKED_UP, leaf_of
from xlstm_jax.forecast.cost.collective_traffic import find_collectives
from xlstm_jax.forecast.hlo.program import parse

LENGTH, MESH = 12, mesh_of(2, 4)
PROMPT = np.random.default_rng(0).integers(0, 256, (8, 3), np.int32)
PROMPT[2:4, 2], PROMPT[4, 1:] = -1, -1  # rows of different lengths


def model_and_params(block="transformer", mesh=MESH, dtype=jnp.float32):
    model = LanguageModel(block, dim=16, num_layers=2, num_heads=2, wrap=fsdp(), dtype=dtype)
    params = init_sharded(model, mesh, jax.random.key(0), jnp.zeros((8, LENGTH), int), batch_axes=AXES)["params"]
    return model, jax.tree.map(lambda w: 4 * w, params)  # large weights, so that the text is no constant


def generator(model, mesh=MESH, **options):
    return make_generate(model.clone(decode=True), mesh, AXES, LENGTH, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("gather", ["each_token", "once"])
def test_a_text_is_that_of_the_model_that_reads_it_whole(block, gather):
    """Greedily; in float64, where no rounding changes which byte is the likeliest."""
    with jax.enable_x64(True):
        model, params = model_and_params(block, dtype=jnp.float64)
        got = np.asarray(generator(model, gather=gather)(params, PROMPT))
        apply, params = jax.jit(model.clone(wrap=None).apply), jax.device_get(unbox(params))
        logits = np.asarray(apply({"params": params}, got))
    # Each byte that was not given is the likeliest after those before it, by the model that reads all of them at once.
    given = np.pad(PROMPT, [(0, 0), (0, LENGTH - 3)], constant_values=-1)[:, 1:]
    assert_array_equal(got[:, 1:], np.where(given < 0, np.argmax(logits[:, :-1], axis=-1), given))
    assert len(np.unique(got[:, 3:])) > 8  # guard


def test_what_is_drawn_depends_on_the_key_and_not_on_the_mesh():
    prompt = np.tile(PROMPT[:1], (8, 1))
    drawn = {}
    for mesh, seed in [(MESH, 1), (MESH, 2), (mesh_of(1, 1), 1)]:
        model, params = model_and_params(mesh=mesh)
        drawn[mesh, seed] = np.asarray(generator(model, mesh, temperature=4.0)(params, prompt, jax.random.key(seed)))
    assert_array_equal(drawn[MESH, 1], drawn[mesh_of(1, 1), 1])
    assert len(np.unique(drawn[MESH, 1], axis=0)) == 8 and np.any(drawn[MESH, 1] != drawn[MESH, 2])  # guard


@pytest.mark.parametrize("gather, times", [("each_token", LENGTH - 1), ("once", 1)])
def test_weights_are_gathered_as_often_as_was_said(gather, times):
    """Also in the compiled program, where loops are counted: XLA moves out of a loop what it does not change."""
    model, params = model_and_params()
    program = generator(model, gather=gather).lower(params, PROMPT).compile()
    found = find_collectives(parse(program.as_text()), MESH.shape)
    leaves = [leaf_of(leaf) for _, leaf in trees.leaves_with_path(params) if leaf_of(leaf).axes]
    if gather == "each_token":  # the table of the embedding stays where it is: the row of a byte is fewer bytes
        leaves = [leaf for leaf in leaves if LOOKED_UP not in leaf.marks]
        assert any(collective.looks_up_rows for collective in found)
    of_weights = [collective for collective in found if not collective.looks_up_rows]
    assert {collective.kind for collective in of_weights} == {"all-gather"}
    gathered = sum(collective.count * collective.payload_bytes for collective in of_weights)
    assert gathered == times * sum(leaf.value.nbytes for leaf in leaves)
