"""The search for options that fit: what it tries, in which order, and that its best is the fastest of what fits."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from tests.test_forecast import Block, loss_fn, rendered
from xlstm_jax.distributed import shard_module_params
from xlstm_jax.distributed.forecast import Workload
from xlstm_jax.distributed.forecast.planner import OTHER_MIN_WEIGHT_SIZE, Options, default_meshes, fit

MIB = 2**20


class Model(nn.Module):
    """Scanned blocks that are built as the options say; what is kept is chosen by a remat policy."""

    shard_axes: tuple[str, ...]
    min_weight_size: int
    keep_gathered: bool
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = shard_module_params(Block, self.shard_axes, self.min_weight_size)
        if self.remat or not self.keep_gathered:
            policy = None if self.remat else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            block = nn.remat(block, prevent_cse=False, policy=policy)
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return layers(name="blocks")(x)[0]


def build_step(options, rows=8):
    model = Model(options.shard_axes, options.min_weight_size, options.keep_gathered, options.remat)
    x = jax.ShapeDtypeStruct((rows, 8192, 512), jnp.float32)
    return Workload(model, optax.sgd(1e-3), x, loss_fn).build_step(options.mesh, options.num_minibatches)


@pytest.mark.parametrize(
    "shape, want",
    [
        ((1, 1), [{"fsdp": 1}]),
        ((1, 8), [{"fsdp": 8}]),
        ((4, 8), [{"fsdp_x": 4, "fsdp_y": 8}, {"fsdp": 32}, {"dp": 4, "fsdp_y": 8}]),
        (
            (4, 4, 8),
            [{"fsdp_x": 4, "fsdp_y": 4, "fsdp_z": 8}, {"fsdp": 128}, {"dp": 4, "fsdp_y": 4, "fsdp_z": 8}],
        ),
    ],
    ids=str,
)
def test_meshes_that_suit_a_torus(shape, want):
    assert default_meshes(shape) == want
    assert Options(want[-1]).shard_axes == tuple(axis for axis in want[-1] if axis != "dp")


def test_what_cannot_be_built_at_all_is_an_error():
    def refuse(options):
        raise ValueError(f"no model for {options.mesh}")

    with pytest.raises(ValueError, match=r"cannot build the first options, Options\(mesh=\{'fsdp': 4\}.*no model for"):
        fit(refuse, "v5e:2x2", meshes=[{"fsdp": 4}])
    with pytest.raises(ValueError, match=r"topology='v5e:3x3': there is no such slice"):
        fit(refuse, "v5e:3x3")


@pytest.fixture(scope="module")
def tight():
    """A search under a budget that takes minibatches; rows for two of them on each device, not for four."""
    pytest.importorskip("libtpu")
    tried = []
    return fit(build_step, "v5e:2x2", 200 * MIB, meshes=[{"fsdp": 4}], on_trial=tried.append), tried


@pytest.mark.libtpu
def test_the_best_is_the_fastest_of_what_fits(tight):
    found, _ = tight
    fitting = [trial for trial in found.trials if trial.fits]
    assert fitting and found.best is fitting[0]
    assert all(trial.bytes_per_device <= 200 * MIB for trial in fitting)
    assert found.best.seconds == min(trial.seconds for trial in fitting)
    assert [trial.fits for trial in found.trials] == sorted((trial.fits for trial in found.trials), reverse=True)


@pytest.mark.libtpu
def test_each_way_is_tried_and_minibatches_only_where_none_fits(tight):
    found, tried = tight
    ways = [(o.keep_gathered, o.remat, o.num_minibatches) for o in tried]
    assert ways[:3] == [(True, False, 1), (False, False, 1), (False, True, 1)]
    assert ways[3][2] == 2 and tried[-1].min_weight_size == OTHER_MIN_WEIGHT_SIZE
    by_options = {(t.options.keep_gathered, t.options.remat, t.options.num_minibatches): t for t in found.trials}
    saved = [by_options[way].bytes_per_device for way in ways[:3]]
    assert saved[0] > saved[1] > saved[2] > 200 * MIB  # each saves memory, and none of them fits


@pytest.mark.libtpu
def test_the_table_and_the_json_tell_all_trials(tight):
    found, tried = tight
    text = rendered(found.table())
    assert "What fits into 200 MiB on each device of v5e:2x2" in text and text.count("fsdp=4") == len(tried)
    data = json.loads(found.to_json())
    assert len(data["trials"]) == len(tried) and data["trials"][0]["fits"] is True
