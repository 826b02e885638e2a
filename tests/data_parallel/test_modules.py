"""Tests of wrapped modules: names, methods, transformations and collections equal the plain module, in any context."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from tests.support import AXES, Block, Model, assert_same_bits, assert_same_params, fsdp, mesh_of, normal, on_mesh
from xlstm_jax.distributed import init_sharded, partition_specs, shard_module_params, unbox, value_and_grad
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of, path_in_model
from xlstm_jax.distributed.data_parallel.modules.linen_module import active_interceptors_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

KEY = jax.random.key(0)
X = normal(1, (16, 16))


def check_parity(make, x=X, mesh=None, loss=None, check_vma=True, min_sharded=1, **apply_options):
    """Checks that ``make(wrap)`` has the same values and gradients wrapped on a mesh and plain on one device.

    The wrapped model is initialised by ``init_sharded``; forward and backward run inside ``shard_map``. At least
    ``min_sharded`` leaves must be split, so that a wrapper without effect fails.
    """
    mesh = mesh or mesh_of(2, 4)
    loss = loss or (lambda model, variables, x: jnp.mean(jnp.sin(model.apply(variables, x, **apply_options)) ** 2))
    plain, wrapped = make(lambda target: target), make(fsdp())
    want = jax.jit(plain.init)(KEY, x)
    got = init_sharded(wrapped, mesh, KEY, x, batch_axes=AXES)
    assert sum(bool(leaf_of(leaf).axes) for _, leaf in leaves_with_path(got)) >= min_sharded
    assert_same_params(got, want, tolerance=3e-7)

    want_loss, want_grads = jax.jit(jax.value_and_grad(lambda v: loss(plain, v, x)))(want)
    specs = partition_specs(got, mesh)
    run = on_mesh(
        value_and_grad(lambda v, x: loss(wrapped, v, x), AXES), mesh, check_vma, (specs, P(AXES)), (P(), specs)
    )
    got_loss, got_grads = run(got, x)
    assert_allclose(got_loss, want_loss, rtol=1e-5)
    assert_same_params(got_grads, want_grads)
    # Outside of shard_map the wrapped model sees global values, boxed or bare, and is the plain one.
    assert_allclose(jax.jit(lambda v: loss(wrapped, v, x))(got), want_loss, rtol=1e-5)
    assert_allclose(jax.jit(lambda v: loss(wrapped, v, x))(want), want_loss, rtol=1e-5)


# --------------------------------------------------------------------------------------------------- names and methods


class Tied(nn.Module):
    """An embedding used twice: for the lookup, and by ``attend`` as the head."""

    wrap: object

    def setup(self):
        self.embed = self.wrap(nn.Embed)(24, 16)

    def __call__(self, tokens):
        return self.embed.attend(jnp.tanh(self.embed(tokens)))


class TwoMethods(nn.Module):
    """Module without ``__call__``: helpers that Linen does not wrap, and a function as a field."""

    activation: object = nn.relu

    def setup(self):
        self.dense = nn.Dense(16)
        self.readout = nn.Dense(16)

    def encode(self, x):
        return self.activation(self.dense(x))

    def decode(self, x):
        return self.readout(self.encode(x))

    @nn.nowrap
    def width(self):
        return 16

    @staticmethod
    def double(x):
        return 2 * x

    @property
    def name_of_activation(self):
        return self.activation.__name__


def test_wrapped_class_keeps_class_name_and_parameter_names():
    wrapped = fsdp(nn.Dense)
    assert (wrapped.__name__, wrapped.__qualname__, wrapped.__module__) == ("Dense", "Dense", nn.Dense.__module__)
    assert issubclass(wrapped, nn.Dense)
    for scan in (True, False):
        plain = jax.eval_shape(Model(scan=scan).init, KEY, X)
        assert jax.tree.structure(jax.eval_shape(Model(fsdp(), scan).init, KEY, X)) == jax.tree.structure(plain)


def test_attend_of_a_tied_embedding_matches_the_plain_model():
    tokens = jnp.arange(16) % 24
    check_parity(Tied, x=tokens, loss=lambda m, v, t: jnp.mean(nn.log_softmax(m.apply(v, t))[:, 0] ** 2))


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_every_public_method_of_a_wrapped_module_gathers_parameters(method):
    class Outer(nn.Module):
        wrap: object

        def setup(self):
            self.inner = self.wrap(TwoMethods)()

        def __call__(self, x):
            # Both modules run at init, so that all parameters exist.
            outputs = {"encode": self.inner.encode(x), "decode": self.inner.decode(x)}
            return outputs[method]

    check_parity(Outer)


def test_methods_without_parameters_work_on_an_unbound_wrapped_module():
    module = fsdp(TwoMethods)()
    assert module.width() == 16 and module.double(4) == 8 and module.name_of_activation == "relu"
    cell = fsdp(nn.LSTMCell)(features=16)
    assert [c.shape for c in cell.initialize_carry(KEY, (2, 16))] == [(2, 16), (2, 16)]


def test_apply_with_method_gathers_parameters_inside_shard_map():
    wrapped, mesh = fsdp(TwoMethods)(), mesh_of(2, 4)
    plain_variables = TwoMethods().init(KEY, X, method="decode")
    boxed = init_sharded(wrapped, mesh, KEY, X, batch_axes=AXES, method="decode")
    specs = partition_specs(boxed, mesh)
    for method in ("encode", wrapped.encode):
        run = on_mesh(lambda v, x, m=method: wrapped.apply(v, x, method=m), mesh, True, (specs, P(AXES)), P(AXES))
        assert_allclose(run(boxed, X), TwoMethods().apply(plain_variables, X, method="encode"), rtol=1e-5, atol=1e-6)


def test_shard_not_gathered_by_a_wrapper_is_gathered_on_read():
    """A shard gathers itself on a read in a method of the plain class, or in a module shared into a wrapped module."""

    class Shares(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = fsdp(nn.Dense)(16, name="dense")

            class Inner(nn.Module):
                shared: nn.Module

                @nn.compact
                def __call__(self, x):
                    return self.shared(x)

            return dense(fsdp(Inner)(dense, name="inner")(x))

    mesh = mesh_of(2, 4)
    for model, method in [(fsdp(TwoMethods)(), TwoMethods.encode), (Shares(), None)]:
        boxed = init_sharded(model, mesh, KEY, X, batch_axes=AXES, method="decode" if method else None)
        specs = partition_specs(boxed, mesh)
        run = on_mesh(lambda v, x, a=model.apply, m=method: a(v, x, method=m), mesh, True, (specs, P(AXES)), P(AXES))
        assert_allclose(run(boxed, X), model.apply(boxed, X, method=method), rtol=1e-5, atol=1e-6)
        shards = on_mesh(lambda v: jax.tree.map(lambda s: s[None], unbox(v)), mesh, True, (specs,), P(AXES))(boxed)
        assert shards["params"]["dense"]["kernel"].shape != (8, 16, 16)  # guard: a device holds a shard


def test_weight_norm_inside_a_wrapped_module_matches_the_plain_model():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.WeightNorm(nn.Dense(16, name="dense"))(x)

    check_parity(lambda wrap: wrap(Normed)())


def test_init_and_apply_with_method_outside_shard_map_equal_the_plain_module():
    wrapped = fsdp(TwoMethods)()
    variables = wrapped.init(KEY, X, method="decode")
    assert_array_equal(
        wrapped.apply(variables, X, method=wrapped.encode), TwoMethods().apply(variables, X, method="encode")
    )


# ----------------------------------------------------------------------------------------------------- transformations

SCAN = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}


def scanned(block, x, **options):
    return nn.scan(block, **{**SCAN, **options})(name="blocks")(x, None)[0]


STACKS = {
    "scan(wrap)": lambda w: lambda x: scanned(w(Block), x),
    "scan(remat(wrap))": lambda w: lambda x: scanned(nn.remat(w(Block)), x),
    "scan(wrap(remat))": lambda w: lambda x: scanned(w(nn.remat(Block)), x),
    "remat(scan(wrap))": lambda w: lambda x: nn.remat(nn.scan(w(Block), **SCAN))(name="blocks")(x, None)[0],
    "wrap(scan)": lambda w: lambda x: w(nn.scan(Block, **SCAN))(name="blocks")(x, None)[0],
    "scan(wrap), named layers": lambda w: lambda x: scanned(w(Block), x, metadata_params={nn.PARTITION_NAME: None}),
    "jit(wrap)": lambda w: lambda x: nn.jit(w(Block))(name="block")(x)[0],
    "wrap(jit)": lambda w: lambda x: w(nn.jit(Block))(name="block")(x)[0],
    "jit(remat(wrap))": lambda w: lambda x: nn.jit(nn.remat(w(Block)))(name="block")(x)[0],
    "vmap(wrap), shared": lambda w: (
        lambda x: nn.vmap(w(nn.Dense), variable_axes={"params": None}, split_rngs={"params": False})(16, name="dense")(
            x
        )
    ),
    "vmap(wrap), experts": lambda w: (
        lambda x: nn.vmap(
            w(nn.Dense), in_axes=None, out_axes=0, axis_size=3, variable_axes={"params": 0}, split_rngs={"params": True}
        )(16, name="dense")(x).mean(0)
    ),
    "wrap(vmap)": lambda w: (
        lambda x: w(nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False}))(16, name="dense")(
            x
        )
    ),
    "wrap(wrap)": lambda w: lambda x: w(w(Block))(name="block")(x)[0],
    "called twice": lambda w: lambda x: (lambda dense: dense(jnp.tanh(dense(x))))(w(nn.Dense)(16, name="dense")),
    "partial": lambda w: lambda x: w(partial(nn.Dense, use_bias=False))(16, name="dense")(x),
}


# Types work in every order; without types the position and the number of gathers matter.
WITHOUT_TYPES = ("scan(remat(wrap))", "wrap(scan)", "jit(wrap)", "vmap(wrap), experts", "called twice")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "stack, check_vma", [(stack, True) for stack in STACKS] + [(stack, False) for stack in WITHOUT_TYPES]
)
def test_stacked_linen_transforms_around_wrapped_modules_match_the_plain_model(stack, check_vma):
    class Net(nn.Module):
        wrap: object

        @nn.compact
        def __call__(self, x):
            return STACKS[stack](self.wrap)(x)

    check_parity(Net, check_vma=check_vma)


def test_nested_wrapped_modules_match_the_plain_model():
    class Inner(nn.Module):
        wrap: object

        @nn.compact
        def __call__(self, x):
            return self.wrap(nn.Dense)(16)(x) + self.param("offset", nn.initializers.ones, (64,))[:16]

    check_parity(lambda wrap: wrap(Inner)(wrap), min_sharded=2)


def test_nested_wrappers_over_different_axes_split_a_kernel_over_both():
    class Net(nn.Module):
        inner: object
        outer: object

        @nn.compact
        def __call__(self, x):
            return self.outer(self.inner(nn.Dense))(16, name="dense")(x)

    def make(wrap):
        wrapped = wrap(nn.Dense) is not nn.Dense
        return Net(fsdp(), fsdp(axis_name="dp")) if wrapped else Net(wrap, wrap)

    check_parity(make)
    variables = init_sharded(make(fsdp()), mesh_of(2, 4), KEY, X, batch_axes=AXES)
    assert variables["params"]["dense"]["kernel"].names == ("dp", "fsdp")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("axis_name", [("dp", "fsdp"), ("fsdp", "dp"), ["dp"]], ids=str)
def test_wrapper_with_a_sequence_of_axes_matches_the_plain_model(axis_name):
    check_parity(lambda wrap: Model(wrap if wrap(nn.Dense) is nn.Dense else fsdp(axis_name=axis_name)))


def test_wrapped_module_instance_keeps_fields_and_name():
    wrapped = fsdp(nn.Dense(16, use_bias=False, name="mine"))
    assert (wrapped.features, wrapped.use_bias, wrapped.name) == (16, False, "mine")
    check_parity(lambda wrap: wrap(nn.Dense(16)))


def test_module_instance_wrapped_in_setup_matches_the_plain_model():
    class Net(nn.Module):
        wrap: object

        def setup(self):
            self.dense = self.wrap(nn.Dense(16))

        def __call__(self, x):
            return self.dense(x)

    check_parity(Net)


def test_wrapped_function_of_a_module_matches_the_plain_model():
    class Net(nn.Module):
        wrap: object

        @nn.compact
        def __call__(self, x):
            return self.wrap(lambda module, x: nn.Dense(16, name="dense")(x))(self, x)

    check_parity(Net)


# ------------------------------------------------------------------------------------------------- other collections


class WithStatistics(nn.Module):
    """BatchNorm beside the parameters, a sown intermediate, and dropout."""

    wrap: object = staticmethod(lambda cls: cls)

    @nn.compact
    def __call__(self, x, train=True):
        class Inner(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Dense(16, name="dense")(x)
                self.sow("intermediates", "hidden", x)
                return nn.BatchNorm(use_running_average=not train, axis_name="dp" if train else None, name="norm")(x)

        return self.wrap(Inner)(name="inner")(x)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_batch_stats_and_intermediates_pass_through_a_wrapped_module(check_vma):
    mesh, x = mesh_of(4, 2), X
    plain, wrapped = WithStatistics(), WithStatistics(fsdp())
    want = jax.jit(partial(plain.init, train=False))(KEY, x)
    got = init_sharded(wrapped, mesh, KEY, x, batch_axes=AXES, train=False)
    assert_same_params(got, want, tolerance=3e-7)
    assert is_box(got["params"]["inner"]["dense"]["kernel"])
    assert not [path for path, leaf in leaves_with_path(got["batch_stats"]) if is_box(leaf)]

    specs = partition_specs(got, mesh)

    # The batch lies on dp alone, and the statistics are reduced over dp by the module itself.
    def local(variables, x):
        _, updates = wrapped.apply(variables, x, mutable=["batch_stats", "intermediates"])
        return updates["batch_stats"], updates["intermediates"]["inner"]["hidden"][0]

    # Over fsdp all devices compute the same statistics, which types cannot show: each device returns a copy.
    run = on_mesh(
        lambda v, x: jax.tree.map(lambda s: s[None], local(v, x)[0]),
        mesh,
        check_vma,
        (specs, P("dp")),
        P(("dp", "fsdp")),
    )
    stats = run(got, x)
    mean = stats["inner"]["norm"]["mean"]
    hidden = x @ want["params"]["inner"]["dense"]["kernel"]
    assert mean.shape == (8, 16)
    assert_allclose(mean, np.broadcast_to(0.01 * np.mean(hidden, 0), (8, 16)), rtol=1e-4, atol=1e-6)


def test_wrapper_splits_params_but_no_other_collection():
    class Cache(nn.Module):
        @nn.compact
        def __call__(self, x):
            cache = self.variable("cache", "rows", jnp.zeros, (64, 16))
            return nn.Dense(16)(x) + cache.value[: x.shape[0]]

    got = init_sharded(fsdp(Cache)(), mesh_of(2, 4), KEY, X, batch_axes=AXES)
    assert is_box(got["params"]["Dense_0"]["kernel"]) and not is_box(got["cache"]["rows"])


# --------------------------------------------------------------------------------------------------------- contexts


def test_wrapped_module_outside_shard_map_equals_the_plain_module_bit_for_bit():
    plain, wrapped = Model(), Model(fsdp())
    variables = jax.jit(plain.init)(KEY, X)
    again = jax.jit(wrapped.init)(KEY, X)
    assert jax.tree.structure(again) == jax.tree.structure(variables)
    assert_same_bits(again, variables)
    assert_array_equal(jax.jit(wrapped.apply)(variables, X), jax.jit(plain.apply)(variables, X))
    assert nn.tabulate(wrapped, KEY)(X).count("blocks") > 0


def test_init_under_jax_set_mesh_returns_boxes_with_global_values():
    mesh = mesh_of(2, 4)
    with jax.set_mesh(mesh):
        variables = jax.jit(Model(fsdp()).init)(KEY, X)
        boxed = [leaf for _, leaf in leaves_with_path(variables) if is_box(leaf)]
        kernel = variables["params"]["Dense_0"]["kernel"]
        assert boxed and kernel.names == (None, "fsdp") and kernel.value.shape == (16, 16)
        assert_allclose(
            jax.jit(Model(fsdp()).apply)(variables, X), Model().apply(unbox(variables), X), rtol=1e-4, atol=1e-6
        )


def test_init_inside_shard_map_gives_the_values_of_the_plain_model():
    mesh, plain, wrapped = mesh_of(2, 4), Model(), Model(fsdp())
    specs = partition_specs(init_sharded(wrapped, mesh, KEY, X, batch_axes=AXES), mesh)
    got = on_mesh(wrapped.init, mesh, False, (P(), P(AXES)), specs)(KEY, X)
    assert_same_params(got, jax.jit(plain.init)(KEY, X), tolerance=3e-7)


@pytest.mark.parametrize("init", [True, False], ids=["init", "apply"])
def test_wrapper_raises_for_a_misspelt_axis_and_lists_the_mesh_axes(init):
    wrapped, mesh = Model(fsdp(axis_name="fdsp")), mesh_of(2, 4)
    variables = jax.jit(Model().init)(KEY, X)
    run = (lambda x: wrapped.init(KEY, x)) if init else (lambda x: wrapped.apply(variables, x))
    with pytest.raises(ValueError, match=r"shard_module_params: 'fdsp' is not a bound.*\('dp', 'fsdp'\)"):
        on_mesh(run, mesh, False, P(AXES), P())(X)
    with pytest.raises(
        ValueError, match=r"'fdsp' is not an axis of the mesh that jax.set_mesh has set.*\('dp', 'fsdp'\)"
    ):
        init_sharded(wrapped, mesh, KEY, X, batch_axes=AXES)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("axis", [1, 0, -1])
def test_nn_scan_over_wrapped_blocks_accepts_any_layer_dim(axis):
    def make(wrap):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return scanned(wrap(Block), x, variable_axes={"params": axis})

        return Net()

    check_parity(make)


def test_shard_module_params_raises_for_invalid_gather_dtype_or_min_weight_size():
    with pytest.raises(TypeError, match="bf16"):
        fsdp(nn.Dense, gather_dtype="bf16")
    with pytest.raises(TypeError, match=r"min_weight_size=.*bfloat16.* is not a number of values"):
        shard_module_params(nn.Dense, "fsdp", jnp.bfloat16)


def test_integer_and_key_leaves_beside_weights_have_float0_gradients():
    class Net(nn.Module):
        wrap: object

        @nn.compact
        def __call__(self, x):
            class Inner(nn.Module):
                @nn.compact
                def __call__(self, x):
                    table = self.param("order", lambda key: jnp.arange(16, dtype=jnp.int32)[::-1])
                    self.param("noise", lambda key: jax.random.split(key, 16))
                    return nn.Dense(16)(x)[:, table]

            return self.wrap(Inner)(name="inner")(x)

    wrapped, mesh = Net(fsdp(min_weight_size=8, gather_dtype=jnp.bfloat16)), mesh_of(2, 4)
    variables = init_sharded(wrapped, mesh, KEY, X, batch_axes=AXES)
    assert is_box(variables["params"]["inner"]["order"]) and not is_box(variables["params"]["inner"]["noise"])
    specs = partition_specs(variables, mesh)
    grads = value_and_grad(lambda v, x: jnp.mean(wrapped.apply(v, x) ** 2), AXES)
    _, got = on_mesh(grads, mesh, True, (specs, P(AXES)), (P(), specs))(variables, X)
    assert got["params"]["inner"]["order"].value.dtype == jax.dtypes.float0
    assert got["params"]["inner"]["noise"].dtype == jax.dtypes.float0
    plain = Net(lambda cls: cls)
    want = jax.grad(lambda v: jnp.mean(plain.apply(v, X) ** 2), allow_int=True)(unbox(jax.device_get(variables)))
    assert_allclose(
        got["params"]["inner"]["Dense_0"]["kernel"].value,
        want["params"]["inner"]["Dense_0"]["kernel"],
        rtol=0.1,
        atol=2e-3,
    )


def test_watching_returns_linen_interceptors_innermost_first():
    """``active_interceptors_of`` returns interceptors innermost first; fails if a release changes the stack."""

    class Watcher:
        def intercept(self, method, args, kwargs, context):
            return method(*args, **kwargs)

    outer, inner = Watcher(), Watcher()
    assert active_interceptors_of(Watcher) == []
    with nn.intercept_methods(outer.intercept), nn.intercept_methods(inner.intercept):
        assert active_interceptors_of(Watcher) == [inner, outer]


def test_path_in_model_drops_the_collection_and_keeps_the_module_path():
    """``path_in_model`` drops the collection name at the front and keeps equal names within the path."""
    assert path_in_model(("block", "Dense_0"), "params/kernel") == "block/Dense_0/kernel"
    assert path_in_model((), "params/Dense_0/params") == "Dense_0/params"
    assert path_in_model(None, "params/kernel") == "params/kernel"
