"""Tests of a user-defined wire format and extension, each in a single file: the code that such a file needs."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from tests.support import AXES, KEPT, assert_same_params, data, fsdp, mean_loss, mesh_of, plain, train_on_one_device
from xlstm_jax.distributed import check_step, create_train_state, make_train_step, plan_sharding, scan_layers, unbox
from xlstm_jax.distributed.data_parallel.extension import EXTENSIONS, Extension, register, replace_extensions
from xlstm_jax.distributed.data_parallel.wire.wire import WIRE_FORMATS, WireFormat

NAME = "bfloat16_stochastic"
BATCH = data()
UNIT = 2.0**-8  # the distance of two bfloat16 values, relative to the larger: more than stochastic rounding changes


@jax.tree_util.register_static
@dataclass(frozen=True)
class Stochastic:
    """Wire format in bfloat16 with stochastic rounding, whose mean is right."""

    rounds_again: ClassVar[bool] = True
    dtype: object

    def send(self, shard):
        bits = lax.bitcast_convert_type(shard.astype(jnp.float32), jnp.uint32)
        # Random bits derived from the values, so that a step needs no key: add 16 bits, then truncate.
        noise = (bits * jnp.uint32(2654435761)) >> 16
        return lax.bitcast_convert_type(((bits + noise) >> 16).astype(jnp.uint16), jnp.bfloat16)

    def along(self, dim):
        return dim

    def receive(self, arrived):
        return arrived.astype(self.dtype)


class StochasticFormat(WireFormat):
    itemsize = 2.0

    def wire(self, shape, dtype, dim):
        return Stochastic(dtype)

    def nbytes(self, shape, dim):
        return 2 * int(np.prod(shape))


@pytest.fixture
def format_of_ones_own(monkeypatch):
    monkeypatch.setitem(WIRE_FORMATS, NAME, StochasticFormat())
    return NAME


class Deep(nn.Module):
    wrap: object = staticmethod(plain)
    ahead: bool = False

    @nn.compact
    def __call__(self, x):
        x = self.wrap(nn.Dense)(16)(x)
        if self.ahead:
            x, _ = scan_layers(self.wrap(Layer), 3)(name="layers")(x, None)
        return self.wrap(nn.Dense)(4)(x)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(16)(x)), None


def gradients(wrap, check_vma, ahead=False):
    model = Deep(wrap, ahead)
    mesh = mesh_of(2, 4)
    state = create_train_state(model, KEPT, mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES)
    step = make_train_step(mean_loss, mesh, AXES, check_vma=check_vma)
    return state, step, mesh


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_custom_gather_format_is_sent_and_gradients_match_within_rounding(format_of_ones_own, check_vma, ahead):
    state, step, _ = gradients(fsdp(gather_dtype=format_of_ones_own), check_vma, ahead)
    text = step.lower(state, BATCH, jax.random.key(1)).as_text()
    sent = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    assert sent and all("xbf16>" in line for line in sent)
    params = unbox(jax.tree.map(np.asarray, state.params))
    want = train_on_one_device(Deep(ahead=ahead), KEPT, params, mean_loss, BATCH)[1]
    got = step(state, BATCH, jax.random.key(1))[0].opt_state
    # Each weight is off by at most one unit of bfloat16, and a gradient passes three products of weights.
    assert_same_params(got, want, 8 * UNIT)
    with pytest.raises(AssertionError):  # guard: values are rounded
        assert_same_params(got, want, UNIT / 64)


def test_plan_and_check_step_accept_a_custom_gather_format(format_of_ones_own):
    model = Deep(fsdp(gather_dtype=format_of_ones_own))
    plan = plan_sharding(model, {"dp": 2, "fsdp": 4}, BATCH["x"])
    kernel = next(row for row in plan.rows if row.path == "Dense_0/kernel")
    assert (kernel.gather_dtype, kernel.gather_itemsize, kernel.gathered_bytes) == (NAME, 2.0, 2 * 8 * 16)
    state, step, _ = gradients(fsdp(gather_dtype=format_of_ones_own), True)
    assert check_step(step, state, BATCH, jax.random.key(1)).verdict == "right"


def test_leaf_of_a_dtype_that_a_format_does_not_support_is_refused_by_its_path(format_of_ones_own):
    model = fsdp(gather_dtype=format_of_ones_own)(nn.Dense)(4, param_dtype=jnp.complex64)
    with pytest.raises(
        ValueError, match=r"gather_dtype=bfloat16_stochastic does not fit 'params/kernel' of dtype complex64"
    ):
        plan_sharding(model, {"dp": 2, "fsdp": 4}, BATCH["x"])


def test_gather_dtype_raises_for_an_unregistered_format():
    with pytest.raises(TypeError, match="gather_dtype='bfloat16_stochastic' is no dtype"):
        fsdp(gather_dtype=NAME)(nn.Dense)(4)


class Counting(Extension):
    """Extension that counts the calls of modules within units."""

    calls: ClassVar[list[str]] = []

    def changed_arguments(self, module, method, args, kwargs):
        self.calls.append(type(module).__name__)
        return args, kwargs


@pytest.fixture
def own_extensions():
    registered = list(EXTENSIONS)
    yield
    replace_extensions(registered)


def test_custom_extension_is_called_when_units_gather(monkeypatch, own_extensions):
    monkeypatch.setattr(Counting, "calls", [])
    register(Counting)
    state, step, _ = gradients(fsdp(), True)
    step(state, BATCH, jax.random.key(1))
    assert Counting.calls.count("Dense") > 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_units_gather_with_exact_gradients_without_any_extension(own_extensions, check_vma):
    replace_extensions([])
    state, step, _ = gradients(fsdp(), check_vma)
    params = unbox(jax.tree.map(np.asarray, state.params))
    want = train_on_one_device(Deep(), KEPT, params, mean_loss, BATCH)[1]
    assert_same_params(step(state, BATCH, jax.random.key(1))[0].opt_state, want)
