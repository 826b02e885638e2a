"""Errors of wrapping and splitting parameters: Linen and NNX modules, layers, frozen leaves, dtypes, remat, kernels."""

from functools import cached_property, partial
from types import SimpleNamespace

from flax import nnx, serialization

from tests.errors.shared import (
    AXES,
    BATCH,
    KEY,
    MESH,
    Block,
    P,
    create,
    fsdp,
    jax,
    jnp,
    make_train_step,
    mean_loss,
    mesh_of,
    nn,
    np,
    optax,
    shaped,
)
from tests.errors.table import Section
from xlstm_jax.distributed import (
    PackSmall,
    Replicas,
    TrainState,
    abstract_train_state,
    gather_params,
    init_sharded,
    nnx_model,
    nnx_value_and_grad,
    partition_specs,
    plan_sharding,
    scan_layers,
    shard_module_params,
    shard_modules,
    shard_params,
    sync_gradients,
    typed_kernel,
)
from xlstm_jax.distributed.data_parallel import (
    gather_array_with_mean_grads,
    larger_than,
    rename_leaves,
    split_array_over_mesh,
    stack_layers,
    unstack_layers,
)
from xlstm_jax.distributed.data_parallel.extension import EXTENSIONS, Extension, register, replace_extensions
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.prefetch import route_of
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names
from xlstm_jax.distributed.data_parallel.wire.wire import WIRE_FORMATS, Unchanged, WireFormat

wrapping, names, layers, models, dtypes, frozen, nnx_section, losses, meshes, stored, batches, collections = map(
    Section,
    [
        "Wrapping and splitting parameters",
        "Axis names",
        "Layers in loops and scans",
        "Initial state and models",
        "Dtypes",
        "Frozen parameters",
        "Flax NNX",
        "Loss functions and gradients",
        "Meshes and devices",
        "Safetensors",
        "Batches",
        "Collections beside the parameters",
    ],
)
X, SGD, WHOLE = BATCH["x"], optax.sgd(0.1), P()


class OfNnx(nnx.Module):
    """A module of Flax NNX."""


class Foreign:
    """A class that is not a module."""


def wrapped(*args, **options):
    return lambda: shard_module_params(*args, **options)


def initialised(model, x=X, mesh=MESH, axes=AXES):
    return lambda: jax.eval_shape(partial(init_sharded, model, mesh, KEY, batch_axes=axes), x)


class Around(nn.Module):
    """A module with a wrapped layer instance, named by the parent."""

    @nn.compact
    def __call__(self, x):
        return fsdp(nn.Dense(16))(x)


class Normed(nn.Module):
    """A norm of parameters around a wrapped layer."""

    kind: object = nn.WeightNorm
    wrap: object = fsdp

    @nn.compact
    def __call__(self, x):
        layer = self.kind(self.wrap(nn.Dense)(16, name="half"))
        return layer(x) if self.kind is nn.WeightNorm else layer(x, update_stats=False)


def same(cls):
    return cls


class Layered(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = fsdp(nn.Dense)(16)(x)
        scan = nn.scan(
            fsdp(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(name="blocks")(x, None)[0]


class Named(nn.Module):
    """A kernel with named dims."""

    names: tuple = ("mlp", None)
    shape: tuple = (8, 16)

    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.with_partitioning(nn.initializers.ones, self.names), self.shape)


class Logical(nn.Module):
    """A kernel with a logical name."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.ones, ("mlp", None))
        return x @ self.param("kernel", init, (8, 16))


def closed_over_error(check_vma=True):
    """Traces a loss that closes over boxed parameters."""
    params = init_sharded(fsdp(nn.Dense)(4), MESH, KEY, X, batch_axes=AXES)["params"]
    loss = lambda scale, apply_fn, batch, rng: scale["s"] * mean_loss(params, apply_fn, batch)  # noqa: E731
    state = TrainState.create(apply_fn=fsdp(nn.Dense)(4).apply, params={"s": jnp.ones(())}, tx=SGD)
    make_train_step(loss, MESH, AXES, check_vma=check_vma, allow_replicated=True).trace(state, BATCH, KEY)


def closed_over_in_jit():
    params = init_sharded(fsdp(nn.Dense)(4), MESH, KEY, X, batch_axes=AXES)
    run = jax.jit(lambda params: shaped(lambda x: fsdp(nn.Dense)(4).apply(params, x), X))
    run.trace(params)


def read_whole():
    kernel = init_sharded(fsdp(nn.Dense)(4), MESH, KEY, X, batch_axes=AXES)["params"]["kernel"]
    shaped(lambda x: jnp.sum(kernel.T) + x, X)


def stacked_without_box():
    shaped(
        jax.vmap(lambda w: jnp.sum(w.T)),
        Sharded(jnp.ones((8, 16)), (None, "fsdp")),
        in_specs=P(None, "fsdp"),
        check_vma=False,
    )


def on_shards(fn, shape=(8, 8), spec=WHOLE, out=WHOLE, mesh=MESH, check_vma=False):
    return lambda: shaped(fn, jnp.ones(shape), mesh=mesh, in_specs=spec, out_specs=out, check_vma=check_vma)


def gradient_inside(penalty):
    """Returns a call that traces a loss containing a gradient of split parameters."""
    model = fsdp(nn.Dense)(4)
    state = abstract_train_state(model, SGD, MESH, KEY, X, batch_axes=AXES)

    def loss(params, apply_fn, batch, rng):
        return sum(jnp.sum(g) for g in jax.tree.leaves(penalty(params, apply_fn, batch)))

    return lambda: make_train_step(loss, MESH, AXES).trace(state, BATCH, KEY)


def around_shard_map():
    """Differentiates a ``shard_map`` from outside."""
    loss = lambda w: jnp.sum(gather_params(nn.Partitioned(w, (None, "fsdp")), "fsdp") ** 2)  # noqa: E731
    on_mesh = jax.shard_map(loss, mesh=MESH, in_specs=P(None, "fsdp"), out_specs=P(), check_vma=False)
    jax.eval_shape(jax.grad(on_mesh), jnp.ones((8, 16)))


def gradient_of_a_gradient():
    """Differentiates a gradient of a split parameter."""
    loss = lambda w: jnp.sum(gather_params(nn.Partitioned(w, (None, "fsdp")), "fsdp") ** 3)  # noqa: E731
    twice = jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) ** 2))
    shaped(twice, jnp.ones((8, 16)), in_specs=P(None, "fsdp"), out_specs=P(None, "fsdp"))


def by_hand():
    """Differentiates a gather over an axis of the model by ``jax.grad``."""
    box = lambda w: Sharded(w, (None, "fsdp"), model_axes=("fsdp",))  # noqa: E731
    fn = lambda w: jax.grad(lambda w: jnp.sum(gather_params({"up": box(w)}, "fsdp")["up"] ** 2))(w)  # noqa: E731
    shaped(fn, jnp.ones((8, 16)), in_specs=P(None, "fsdp"), out_specs=P(None, "fsdp"))


def complex_leaf():
    class Complex(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.abs(x @ self.param("kernel", nn.initializers.normal(0.3, jnp.complex64), (8, 4)))

    model = fsdp(Complex, replicas=Replicas("dp", reduce_dtype="bfloat16"))()
    state = abstract_train_state(model, SGD, MESH, KEY, X, batch_axes=AXES)
    make_train_step(mean_loss, MESH, AXES).trace(state, BATCH, KEY)


def gathered_as(dtype, **options):
    fn = lambda w: gather_params({"a": {"w": Sharded(w, ("fsdp", None))}}, "fsdp", **options)["a"]["w"]  # noqa: E731
    return lambda: shaped(fn, jnp.ones((8, 4), dtype), mesh=mesh_of(1, 8), in_specs=P("fsdp"), check_vma=False)


def rounded_twice():
    mesh = create({"fsdp": 2, "tp": 4})
    fn = lambda w: gather_params({"w": Sharded(w, (("fsdp", "tp"), None))}, "fsdp", "int8")  # noqa: E731
    shaped(fn, jnp.ones((16, 4)), mesh=mesh, in_specs=P(("fsdp", "tp")), out_specs=P("tp"), check_vma=False)


def freezing(**options):
    return lambda: abstract_train_state(fsdp(nn.Dense)(16), optax.adam(0.1), MESH, KEY, X, batch_axes=AXES, **options)


def extension_class(**body):
    """Returns a function that defines a subclass ``Own`` of ``Extension`` with the attributes in ``body``."""
    return lambda: type("Own", (Extension,), body)


def gathered_in_a_format(dtype):
    """Returns a function that gathers an array of a dtype in a format, registered meanwhile, for real floats only."""

    def run():
        WIRE_FORMATS["codes"] = WireFormat()
        try:
            plan_sharding(fsdp(nn.Dense, gather_dtype="codes")(4, param_dtype=dtype), {"dp": 2, "fsdp": 4}, X)
        finally:
            del WIRE_FORMATS["codes"]

    return run


def extension_with_a_wire(path):
    """Returns a function that creates a state and a step with an extension whose ``wires`` has the path ``path``."""

    def run():
        before = list(EXTENSIONS)
        register(extension_class(wires=lambda self, policy, variables, module: {path: Unchanged()})())
        try:
            model = fsdp(nn.Dense)(4)
            params = init_sharded(model, MESH, KEY, X, batch_axes=AXES)["params"]
            over = jax.shard_map(
                lambda params, x: model.apply({"params": params}, x),
                mesh=MESH,
                in_specs=(partition_specs(params, MESH), P(AXES)),
                out_specs=P(AXES),
            )
            jax.eval_shape(over, params, X)
        finally:
            replace_extensions(before)

    return run


def box_class(bases=(), **members):
    return lambda: type("Box", (*bases, Sharded), members)


def cached():
    """Returns a ``cached_property`` with its name set."""

    class Has:
        @cached_property
        def total(self):
            return 0

    return vars(Has)["total"]


class HasPostInit:
    """A mixin class."""

    def __post_init__(self):
        """Does nothing."""


def from_state_dict(state):
    box = Sharded(np.ones(2), ("fsdp",))
    return lambda: serialization.from_state_dict({"dense": {"kernel": box}}, {"dense": {"kernel": state}})


# ----- NNX


class Model(nnx.Module):
    """Two layers of NNX."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


class Measured(nnx.Module):
    """A layer of NNX that counts its rows by a metric."""

    def __init__(self, rngs):
        self.linear, self.metric = nnx.Linear(8, 4, rngs=rngs), nnx.metrics.Average()

    def __call__(self, x):
        self.metric.update(values=jnp.ones(len(x)))
        return self.linear(x)


def sharded(make=Model, where=nnx.Linear, **options):
    return shard_modules(nnx_model(make), where, "fsdp", 32, **options)


class Writes(nnx.Module):
    """A model that writes its parameter."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        self.weight[...] = 2 * self.weight[...]
        return x @ self.weight


def writes():
    model = sharded(Writes, Writes)
    shaped(lambda x: model.apply(model.init(KEY), x), X, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)


class Other(nnx.Module):
    """Layers scanned over a dim other than the first."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(16, 8, rngs=rngs), out_axes=1)(rngs.split(3))

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: x + layer(jnp.tile(x, 2)), in_axes=(nnx.Carry, 1), out_axes=nnx.Carry)
        return run(x, self.layers)


def bound(**options):
    def odd(rngs):
        return nnx.Sequential(nnx.Linear(8, 7, use_bias=False, rngs=rngs), nnx.Linear(7, 5, use_bias=False, rngs=rngs))

    model = shard_modules(nnx_model(odd), nnx.Linear, AXES, 16, **options)
    return lambda: model.bind(jax.eval_shape(partial(init_sharded, model, MESH, KEY, batch_axes=AXES), X))


def of_linen():
    shard_modules(nnx_model(lambda rngs: nnx.bridge.ToNNX(nn.Dense(4), rngs=rngs)), nnx.bridge.ToNNX, "fsdp")


W, BOXED = jnp.ones((4, 2)), nn.Partitioned(jnp.ones((4, 2)), (None, "fsdp"))
LOOP, SCAN = "block_{}", "blocks"


def by_index(x):
    return x * jax.lax.axis_index("fsdp")


OPTIONS = [
    (
        "gather-bf16",
        {"gather_dtype": "bf16"},
        TypeError,
        dtypes,
        "…=… is no dtype",
        "gather_dtype='bf16' is no dtype; write gather_dtype='bfloat16' or jnp.bf",
    ),
    (
        "scatter-fp16",
        {"grad_scatter_dtype": "fp16"},
        TypeError,
        dtypes,
        "…=… is no dtype",
        "grad_scatter_dtype='fp16'",
        "='float16'",
    ),
    ("gather-class", {"gather_dtype": nn.Dense}, TypeError, dtypes, "…=… is no dtype", "gather_dtype=<class "),
    ("gather-fp8", {"gather_dtype": "fp8"}, TypeError, dtypes, "…=… is no dtype", "write gather_dtype='float8_e4m3fn'"),
    (
        "gather-int16",
        {"gather_dtype": jnp.int16},
        ValueError,
        dtypes,
        "…=…: parameters and gradients are floats",
        "gather_dtype=int16: ",
        "'bfloat16', or 'int8', ",
    ),
    (
        "scatter-int8",
        {"grad_scatter_dtype": "int8"},
        ValueError,
        dtypes,
        "…=…: … travels in blocks",
        "grad_scatter_dtype=int8: int8 travels in blocks ",
        "a reduce-scatter cannot sum",
    ),
    (
        "scatter-float8",
        {"grad_scatter_dtype": jnp.float8_e4m3fn},
        ValueError,
        dtypes,
        "…=…: … travels in blocks",
        "grad_scatter_dtype=float8_e4m3fn: float8_e4m3fn travels in blocks ",
        "a reduce-scatter cannot sum",
    ),
    (
        "scatter-bool",
        {"grad_scatter_dtype": bool},
        ValueError,
        dtypes,
        "…=…: parameters and gradients are floats",
        "grad_scatter_dtype=bool: ",
    ),
    (
        "size-negative",
        {"min_weight_size": -1},
        ValueError,
        wrapping,
        "min_weight_size=… is negative",
        "0 splits every leaf",
    ),
    (
        "size-nan",
        {"min_weight_size": float("nan")},
        TypeError,
        wrapping,
        "min_weight_size=… is not a number",
        "min_weight_size=nan is not a number of values; pass an int",
    ),
    ("size-float", {"min_weight_size": 2.0**18}, TypeError, wrapping, "min_weight_size=… is not a number", "262144.0"),
    ("size-true", {"min_weight_size": True}, TypeError, wrapping, "min_weight_size=… is not a number", "True"),
    (
        "size-dtype",
        {"min_weight_size": jnp.bfloat16},
        TypeError,
        wrapping,
        "min_weight_size=… is not a number",
        "bfloat16",
    ),
    (
        "reshard",
        {"reshard_after_forward": 1},
        TypeError,
        wrapping,
        "reshard_after_forward=… is not",
        "reshard_after_forward=1 is not True, False, or axes of axis_name",
    ),
    (
        "reshard over another axis",
        {"reshard_after_forward": "tp"},
        ValueError,
        wrapping,
        "reshard_after_forward=… has",
        "has 'tp', which is none of axis_name=('fsdp',)",
    ),
    (
        "trainable",
        {"trainable": lambda path: True},
        TypeError,
        wrapping,
        "trainable=… is not True or False",
        "trainable=<function",
        "create_train_state",
    ),
    ("uneven", {"uneven": "cut"}, ValueError, wrapping, "uneven=… is none of", "uneven='cut'"),
    ("replicas", {"replicas": "dp"}, TypeError, wrapping, "replicas=…: pass Replicas", "pass Replicas('dp')"),
    ("packing", {"packing": True}, TypeError, wrapping, "packing=…: pass PackSmall", "packing=True: pass PackSmall"),
    ("options", {"options": PackSmall()}, TypeError, wrapping, "options=…: pass a tuple", "pass a tuple of options"),
    (
        "options-class",
        {"options": (PackSmall,)},
        TypeError,
        wrapping,
        "options=…: pass a tuple",
        "pass a tuple of options",
    ),
    (
        "inter-host",
        {"inter_host_axes": "host"},
        ValueError,
        wrapping,
        "inter_host_axes=… has",
        "inter_host_axes=('host',) has 'host', which is none of axis_name",
    ),
]
ROWS = [
    # ----- wrappers
    wrapping(
        "reshard-keeps-the-axis-gathered-last",
        wrapped(nn.Dense, ("fsdp", "x"), reshard_after_forward="fsdp"),
        ValueError,
        "reshard_after_forward=… keeps weights",
        "Name 'x' in inter_host_axes",
    ),
    wrapping(
        "packing-below-float",
        lambda: PackSmall(below=2.0**20),
        TypeError,
        "PackSmall(below=…) is not a number",
        "PackSmall(below=1048576.0) is not a number of bytes",
    ),
    wrapping(
        "packing-below-zero",
        lambda: PackSmall(below=0),
        ValueError,
        "PackSmall(below=…) packs no leaf",
        "PackSmall(below=0) packs no leaf",
    ),
    *[
        wrapping(
            f"wrap-{name}",
            wrapped(target, "fsdp"),
            TypeError,
            "shard_module_params takes a Linen module",
            f"takes a Linen module, its class or a function of one, not {says}",
        )
        for name, target, says in [
            ("nnx", OfNnx, "the class OfNnx of flax.nnx. Pass nnx_model("),
            ("nnx-instance", OfNnx(), "an OfNnx of flax.nnx"),
            ("class", Foreign, "the class Foreign"),
            ("dict", {"kernel": 1}, "a dict of 'kernel'"),
            ("swapped", "fsdp", "'fsdp'"),
            ("number", 3, "3"),
        ]
    ],
    *[
        section(f"option-{name}", wrapped(nn.Dense, "fsdp", **options), error, words, *says)
        for name, options, error, section, words, *says in OPTIONS
    ],
    dtypes(
        "copies-bf16",
        lambda: Replicas("dp", reduce_dtype="bf16"),
        TypeError,
        "…=… is no dtype",
        "reduce_dtype='bf16' is no dtype; write reduce_dtype='bfloat16'",
    ),
    dtypes(
        "copies-uint8",
        lambda: Replicas("dp", reduce_dtype="uint8"),
        ValueError,
        "…=…: parameters and gradients are floats",
        "reduce_dtype=uint8: ",
    ),
    names(
        "axis-splits-and-copies",
        wrapped(nn.Dense, AXES, replicas=Replicas("dp")),
        ValueError,
        "… is in axis_name=… and in",
        "'dp' is in axis_name",
    ),
    *[
        names(f"axis-{name}", lambda given=given: as_axis_names(given), ValueError, words, says)
        for name, given, words, says in [
            ("none", None, "axis_name=… names no mesh axis", "axis_name=None"),
            ("empty", (), "axis_name=… names no mesh axis", "()"),
            ("blank", "", "axis_name=… names no mesh axis", "''"),
            ("number", 3, "axis_name=… names no mesh axis", "3"),
            ("with-none", ("fsdp", None), "axis_name=… names no mesh axis", "None"),
            ("twice", ("fsdp", "fsdp"), "axis_name=… names an axis twice", "('fsdp', 'fsdp')"),
            ("set", {"dp"}, "axis_name=…: a set has no order", "a set has no order"),
        ]
    ],
    wrapping(
        "wrap-function-of-neither",
        lambda: fsdp(lambda config: jnp.ones(3))({"a": 1}),
        TypeError,
        "…, which shard_module_params has wrapped, was called",
        "<lambda>, which",
        "was called with a dict of 'a' ",
    ),
    wrapping(
        "wrap-function-by-name",
        lambda: fsdp(lambda **config: 3)(a=1),
        TypeError,
        "…, which shard_module_params has wrapped, was called",
        "no argument by position",
        "make(config) -> nn.Module",
    ),
    wrapping(
        "wrap-named-instance",
        lambda: Around().init(KEY, X),
        TypeError,
        "… got the instance …(name=…)",
        "Dense(name='Dense_0')",
        "Around has",
        "shard_module_params(Dense)(...)",
    )._replace(says=("Dense(name='Dense_0')", "Around has")),
    *[
        wrapping(
            f"wrap-within-{kind.__name__}",
            initialised(Normed(kind)),
            ValueError,
            "'…' is wrapped by shard_module_params, and nn.…",
            "'half' is wrapped ",
            f"nn.{kind.__name__} stands around it",
        )
        for kind in (nn.WeightNorm, nn.SpectralNorm)
    ],
    wrapping(
        "modules-mapped",
        initialised(shard_modules(Normed(nn.WeightNorm, same), nn.Dense, "fsdp", 16)),
        ValueError,
        "shard_modules: '…' runs within an nn.map_variables",
        "'half' runs within",
        "path == ''",
    ),
    wrapping(
        "modules-none-chosen",
        lambda: jax.eval_shape(shard_modules(nn.Sequential([nn.Dense(4)]), nn.ConvLSTMCell, "fsdp").init, KEY, X),
        ValueError,
        "shard_modules: where=… chooses none",
        "ConvLSTM",
        "chooses none of the modules of Sequential: '' (the model itself), 'layers_*' (Dense)",
    ),
    *[
        wrapping(
            f"modules-where-{name}",
            lambda where=where: shard_modules(nn.Dense(4), where, "fsdp"),
            TypeError,
            "where is …: pass a module class",
            "pass a module class (nn.Dense, nnx.Linear) or a tuple of them",
        )
        for name, where in [
            ("string", "Dense"),
            ("instance", nn.Dense(4)),
            ("empty", ()),
            ("number", 3),
            ("mixed", (nn.Dense, "Embed")),
            ("dict", dict),
            ("array", np.ndarray),
        ]
    ],
    wrapping(
        "modules-function",
        lambda: shard_modules(lambda x: x, nn.Dense, "fsdp"),
        TypeError,
        "shard_modules takes a Linen module",
    ),
    wrapping(
        "modules-nnx",
        lambda: shard_modules(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nn.Dense, "fsdp"),
        TypeError,
        "shard_modules takes a Linen module",
        "not a Linear. For flax.nnx: shard_modules(nnx_model",
    ),
    wrapping(
        "modules-holder",
        lambda: shard_modules(SimpleNamespace(_module=nn.Dense(4)), nn.Dense, "fsdp"),
        TypeError,
        "shard_modules takes a Linen module",
        "not a SimpleNamespace. Its 'module' is one: pass that.",
    ),
    wrapping(
        "modules-size",
        lambda: shard_modules(nn.Dense(4), nn.Dense, "fsdp", 2.5),
        TypeError,
        "min_weight_size=… is not a number",
        "min_weight_size=2.5",
    ),
    wrapping("larger-than-negative", lambda: larger_than(-1), ValueError, "size=… is no number of values", "size=-1"),
    # ----- axes
    names(
        "module-axis-in-a-step",
        on_shards(lambda x: fsdp(nn.Dense, axis_name="fdsp")(4).init(KEY, x)),
        ValueError,
        "…: … is not a bound mesh axis",
        "shard_module_params: 'fdsp' is not a bound",
        "('dp', 'fsdp')",
    ),
    names(
        "module-axis-at-init",
        initialised(fsdp(nn.Dense, axis_name="fdsp")(4)),
        ValueError,
        "shard_module_params: … is not an axis of",
        "'fdsp' is not an axis of the mesh that jax.set_mesh has set",
        "('dp', 'fsdp')",
    ),
    names(
        "copies-axis-at-init",
        initialised(fsdp(nn.Dense, replicas=Replicas("slow"))(16)),
        ValueError,
        "shard_module_params: … is not an axis of",
        "'slow' is not an axis of",
        "('dp', 'fsdp')",
    ),
    *[
        names(f"{name}-{where}", call, ValueError, "…: … is not a bound mesh axis", says)
        for name, fn in [
            ("shard-params", lambda w: shard_params({"w": w}, "fdsp", 0)),
            ("gather-params", lambda w: gather_params({"w": Sharded(w, ("fsdp",))}, "fdsp")),
            ("sync-gradients", lambda w: sync_gradients({"w": w}, ("dp", "fdsp"))),
        ]
        for where, call, says in [
            (
                "misspelt",
                on_shards(fn, (8, 4)),
                "'fdsp' is not a bound mesh axis; the axes bound here are ('dp', 'fsdp')",
            ),
            ("outside", lambda fn=fn: fn(jnp.ones((8, 4))), "no mesh axis is bound here. Call it inside jax.shard_map"),
        ]
    ],
    names(
        "two-axes-in-a-string",
        on_shards(lambda w: sync_gradients(w, "fs"), (4,), mesh=create({"f": 2, "s": 4})),
        ValueError,
        "…: … is not a bound mesh axis",
        "'fs' is not a bound mesh axis; the axes bound here are ('f', 's')",
    ),
    names(
        "box-of-another-axis",
        lambda: partition_specs({"blocks": {"kernel": nn.Partitioned(jnp.ones((3, 8)), ("layers", "fsdp"))}}, MESH),
        ValueError,
        "'…' is boxed with names",
        "'blocks/kernel' is boxed",
        "('dp', 'fsdp') and no 'layers'",
        "metadata_params",
    ),
    names(
        "layer-dim-with-a-name",
        initialised(Layered()),
        ValueError,
        "'…' is boxed with names",
        "'params/blocks/",
        "no 'layers'",
    ),
    names(
        "logical-name-without-rules",
        initialised(Logical()),
        ValueError,
        "'…' is boxed with names",
        "no 'mlp'",
        "initialise a model with logical names under nn.logical_axis_rules",
    ),
    wrapping(
        "box-does-not-divide",
        initialised(Named(("fsdp", None), (6, 16)), jnp.ones((8, 6))),
        ValueError,
        "'…' of shape … is boxed as …",
        "kernel' of shape (6, 16)",
        "4 shards do not divide dim 0 of size 6",
    ),
    wrapping(
        "plan-box-does-not-divide",
        lambda: plan_sharding(Named(("fsdp", None)), {"fsdp": 3}, X),
        ValueError,
        "'…' of shape … is boxed as …",
        "3 shards do not divide dim 0 of size 8",
    ),
    meshes(
        "init-batch-axis",
        initialised(fsdp(nn.Dense)(4), axes="data"),
        ValueError,
        "…=…: the mesh has no axis",
        "batch_axes='data': the mesh has no axis 'data'; its axes are",
        "'dp': 2, 'fsdp': 4",
    ),
    # ----- reads, gathers
    wrapping(
        "closed-over",
        closed_over_error,
        ValueError,
        "… is split over … by its box, and its value",
        "'kernel' is split over ('fsdp',)",
        "is unsharded on",
    ),
    wrapping(
        "closed-over-without-types",
        lambda: closed_over_error(False),
        ValueError,
        "… is split over … by its box, and its value",
        "closes over it",
        "docs/frozen.md",
    ),
    wrapping(
        "closed-over-in-jit",
        closed_over_in_jit,
        ValueError,
        "… is split over … by its box, and its value",
        "'kernel' is split over",
        "closes over it",
    ),
    wrapping(
        "read-whole",
        read_whole,
        ValueError,
        "… is split over … by its box, and its value",
        "a parameter that is read is split over ('fsdp',)",
        "(8, 4) is unsharded",
    ),
    wrapping(
        "read-stacked",
        stacked_without_box,
        ValueError,
        "a parameter is read that has the shape",
        "a box for 2 dims",
        "Use nn.vmap",
    ),
    *[
        wrapping(
            f"gather-no-dim-{name}",
            on_shards(lambda w, axis=axis: gather_array_with_mean_grads(w, axis, "fsdp"), shape),
            ValueError,
            "gather_array_with_mean_grads: axis=…",
            f"axis={axis} is no dim of an array of shape",
        )
        for name, shape, axis in [("beyond", (4, 16), 2), ("before", (4, 16), -3), ("scalar", (), 0)]
    ],
    wrapping(
        "split-array-size",
        on_shards(lambda x: split_array_over_mesh(x, "fsdp", 1), (4, 6)),
        ValueError,
        "split_array_over_mesh: dim …",
        "dim 1 of",
        "(4, 6) has size 6, which the 4 devices over ('fsdp',)",
        "Pad it to 8",
    ),
    wrapping(
        "split-array-dim",
        on_shards(lambda x: split_array_over_mesh(x, "fsdp", 2), (4, 6)),
        ValueError,
        "split_array_over_mesh: split_axis=…",
        "split_axis=2 is no dim of an array of shape (4, 6)",
    ),
    names(
        "split-array-axis",
        on_shards(lambda x: split_array_over_mesh(x, "tp", 1), (4, 6)),
        ValueError,
        "…: … is not a bound mesh axis",
        "split_array_over_mesh: 'tp' is not a bound mesh axis",
    ),
    losses(
        "gradient-inside-a-loss",
        gradient_inside(lambda p, f, b: jax.grad(lambda p: mean_loss(p, f, b))(p)),
        ValueError,
        "the gradient of …, of shape",
        "on this device, is taken in a loss function",
        "gather_params(params, axis_name)",
    ),
    losses(
        "gradient-for-each-example",
        gradient_inside(
            lambda p, f, b: jax.vmap(lambda x, y: jax.grad(lambda p: mean_loss(p, f, {"x": x[None], "y": y[None]}))(p))(
                b["x"], b["y"]
            )
        ),
        ValueError,
        "the gradient of …, of shape",
        "is taken under vmap, for each example",
    ),
    losses(
        "gradient-around-shard-map",
        around_shard_map,
        ValueError,
        "the gradient of …, of shape",
        "is taken from outside of shard_map: it would be 1/4 of the gradient",
        "value_and_grad(loss_fn, axis_names)",
    ),
    losses(
        "gradient-of-a-gradient",
        gradient_of_a_gradient,
        ValueError,
        "a gradient is taken of a gradient",
        "gather_params(params, axis_name)",
    ),
    wrapping(
        "gather-by-hand",
        by_hand,
        ValueError,
        "the model itself splits … over",
        "'up' over ('fsdp',)",
        "training.value_and_grad",
    ),
    dtypes(
        "complex-copies",
        complex_leaf,
        ValueError,
        "…=… does not fit",
        "reduce_dtype=bfloat16 does not fit 'kernel' of dtype complex64",
    ),
    *[
        dtypes(f"gather-{name}", gathered_as(dtype, **options), ValueError, words, *says)
        for name, dtype, options, words, *says in [
            (
                "complex",
                jnp.complex64,
                {"gather_dtype": jnp.bfloat16},
                "…=… does not fit",
                "gather_dtype=bfloat16",
                "'a/w'",
                "imaginary part",
            ),
            (
                "complex-scatter",
                jnp.complex64,
                {"grad_scatter_dtype": jnp.float32},
                "…=… does not fit",
                "grad_scatter_dtype=float32",
                "'a/w'",
            ),
            (
                "real-as-complex",
                jnp.float32,
                {"gather_dtype": jnp.complex64},
                "…=… does not fit",
                "gather_dtype=complex64",
                "is a real float",
            ),
            (
                "integers",
                jnp.float32,
                {"gather_dtype": jnp.int16},
                "…=…: parameters and gradients are floats",
                "gather_dtype=int16: ",
            ),
            (
                "complex-int8",
                jnp.complex64,
                {"gather_dtype": jnp.int8},
                "…=… does not fit",
                "gather_dtype=int8 ",
                "imaginary part",
            ),
        ]
    ],
    dtypes(
        "plan-dtype",
        lambda: plan_sharding(fsdp(nn.Dense, gather_dtype=jnp.complex64)(32), {"fsdp": 4}, X),
        ValueError,
        "…=… does not fit",
        "gather_dtype=complex64 does not fit",
        "of dtype float32",
    ),
    dtypes(
        "rounded-twice",
        rounded_twice,
        ValueError,
        "gather_dtype=…: … is split over",
        "'w' is split over ('fsdp', 'tp')",
        "('tp',) stays",
    ),
    # ----- layers and trees
    layers(
        "scan-of-remat",
        lambda: scan_layers(fsdp(nn.remat(Block)), 3),
        TypeError,
        "scan_layers got …",
        "inside nn.remat",
    ),
    layers(
        "scan-remat-of-wrapped",
        lambda: scan_layers(nn.remat(fsdp(Block)), 3),
        TypeError,
        "scan_layers got …",
        "inside nn.remat",
    ),
    layers("scan-of-an-instance", lambda: scan_layers(Block(), 3), TypeError, "scan_layers takes the class"),
    layers(
        "scan-in-axes",
        lambda: scan_layers(Block, 3, in_axes=(0, 1)),
        ValueError,
        "scan_layers: in_axes=…",
        "in_axes=(0, 1) has 1",
    ),
    layers(
        "prefetch-inside",
        lambda: shaped(
            lambda: str(route_of("up/kernel", Sharded(jnp.zeros((4, 8)), (("fsdp", "dp"), None), model_axes=("dp",)))),
            in_specs=(),
            out_specs=None,
            check_vma=False,
        ),
        ValueError,
        "'…' is split as …, and gathered over",
        "'up/kernel' is split as ",
        "only if these axes split one dim",
    ),
    *[
        layers(f"stack-{name}", lambda tree=tree: stack_layers(tree, LOOP, SCAN), ValueError, words, *says)
        for name, tree, words, *says in [
            (
                "none",
                {"dense": W, "norm": W},
                "the tree has no …; its names",
                "no 'block_0'; its names are 'dense', 'norm'",
            ),
            (
                "missing",
                {"block_0": W, "block_2": W},
                "… is missing among the layers",
                "'block_1' is missing among the layers 'block_0', 'block_2'",
            ),
            (
                "shapes",
                {"block_0": W, "block_1": W[:2]},
                "'…/…' is …, and '…/…' is …: the layers",
                "'block_0/.' is float32[4, 2], ",
                "'block_1/.' is float32[2, 2]",
            ),
            (
                "structures",
                {"block_0": {}, "block_1": {"b": W}},
                "'…/…' is …, and '…/…' is …: the layers",
                "'block_0/b' is not there",
            ),
            (
                "boxes",
                {"block_0": W, "block_1": BOXED},
                "'…/…' is …, and '…/…' is …: the layers",
                "in a Partitioned of (None, 'fsdp')",
            ),
            ("taken", {"block_0": W, "blocks": W}, "beside … there is", "beside 'block_0' there is 'blocks' already"),
        ]
    ],
    *[
        layers(f"unstack-{name}", lambda tree=tree: unstack_layers(tree, SCAN, LOOP), ValueError, words, *says)
        for name, tree, words, *says in [
            ("none", {"dense": W}, "the tree has no …; its names", "no 'blocks'; its names are 'dense'"),
            (
                "dims",
                {"blocks": {"a": W, "b": jnp.ones(3)}},
                "…, and '…/…' is …: dim 0 of all",
                "'blocks/b' is float32[3], and 'blocks/a' is float32[4, 2]: dim 0",
            ),
            (
                "split",
                {"blocks": nn.Partitioned(W, ("pipe", None))},
                "…: its layers lie on different devices",
                "'blocks/.' is ",
                "('pipe', None)",
            ),
            ("taken", {"blocks": W, "block_2": W}, "beside … there is", "beside 'blocks' there is 'block_2' already"),
        ]
    ],
    layers(
        "stack-names",
        lambda: stack_layers({}, SCAN, LOOP),
        TypeError,
        "layer_names=… has not one",
        "layer_names='blocks' has not one {}",
    ),
    layers(
        "stack-number",
        lambda: stack_layers({}, LOOP, 0),
        TypeError,
        "a name of layers is",
        "a name of layers is a string, not 0",
    ),
    stored(
        "rename-taken",
        lambda: rename_leaves({"a": {"b": 1, "c": 2}, "d": 3}, {"d": "a/b"}),
        ValueError,
        "'…' would lie at",
        "'d' would lie at 'a/b', where another leaf lies",
    ),
    stored(
        "rename-nothing",
        lambda: rename_leaves({"a": {"b": 1, "c": 2}, "d": 3}, {"e": "f"}),
        ValueError,
        "no path begins with",
        "no path begins with 'e'; the paths are a/b, a/c, d",
    ),
    wrapping(
        "box-post-init",
        box_class(__post_init__=HasPostInit.__post_init__),
        TypeError,
        "the class of boxes",
        "Box has an __init__ or __post_init__, ",
        "class method",
    ),
    wrapping(
        "box-init",
        box_class(__init__=lambda self, value: None),
        TypeError,
        "the class of boxes",
        "Box has an __init__ or __post_init__",
    ),
    wrapping(
        "box-mixed-in",
        box_class((HasPostInit,)),
        TypeError,
        "the class of boxes",
        "Box has an __init__ or __post_init__",
    ),
    wrapping(
        "box-cached",
        box_class(total=cached()),
        TypeError,
        "the class of boxes",
        "Box: total is a cached_property, ",
        "Make it a property",
    ),
    wrapping(
        "box-leaf",
        box_class(scale=1.0, __annotations__={"scale": float}),
        TypeError,
        "the class of boxes",
        "Box: scale would be no leaf ",
        "pytree_node=False",
    ),
    dtypes(
        "format-dtype",
        gathered_in_a_format(jnp.complex64),
        ValueError,
        "…=… does not fit",
        "gather_dtype=codes does not fit 'params/kernel' of dtype complex64",
        "gather_dtype=None",
    ),
    wrapping(
        "extension-no-hook",
        extension_class(changed_argument=lambda self: None),
        TypeError,
        "the extension",
        "Own: the method 'changed_argument' is no hook of Extension; 'changed_arguments' is",
        "Begin the names of other methods with _",
    ),
    wrapping(
        "extension-half",
        extension_class(from_shards=lambda self, *args: None),
        TypeError,
        "the extension",
        "Own: from_shards is called where computes returns True",
        "define both",
    ),
    wrapping(
        "extension-collections",
        extension_class(collections=("stats",), initialising=lambda self, *args: None),
        TypeError,
        "the extension",
        "Own: initialising is never called for an extension with collections",
        "without collections",
    ),
    wrapping(
        "extension-path",
        extension_with_a_wire("kernel"),
        ValueError,
        "the extension",
        "Own: 'kernel', a path in the result of wires or value_replacements, is no leaf",
        "params/kernel",
    ),
    wrapping(
        "state-dict-missing",
        from_state_dict({"names": ()}),
        ValueError,
        "Missing field value in state dict",
        "/dense/kernel",
    ),
    wrapping(
        "state-dict-unknown",
        from_state_dict({"value": np.ones(2), "names": ()}),
        ValueError,
        'Unknown field(s) "…" in state dict',
        "/dense/kernel",
    ),
    # ----- frozen
    frozen(
        "frozen-by-true",
        freezing(trainable=True),
        TypeError,
        "trainable is …; pass a predicate",
        "trainable is True; pass a predicate of a leaf's path",
    ),
    dtypes(
        "frozen-int16",
        freezing(trainable=lambda path: False, frozen_dtype="int16"),
        ValueError,
        "…=…: parameters and gradients are floats",
        "frozen_dtype=int16: ",
    ),
    frozen(
        "frozen-8-bits",
        freezing(trainable=lambda path: False, frozen_dtype="float8_e5m2"),
        ValueError,
        "frozen_dtype=… has … bits",
        "'float8_e5m2' has 8 bits",
        "bfloat16",
    ),
    frozen(
        "frozen-nothing",
        freezing(frozen_dtype="bfloat16"),
        ValueError,
        "frozen_dtype=… is for frozen",
        "none of 2 is frozen",
        "trainable=",
    ),
    # ----- NNX
    nnx_section(
        "nnx-module", lambda: nnx_model(Model(nnx.Rngs(0))), TypeError, "nnx_model takes a function", "not a Model"
    ),
    nnx_section(
        "nnx-no-match",
        lambda: sharded(where=nnx.Conv),
        ValueError,
        "where=… matches no module",
        "Conv",
        "There are (the model): Model, first",
    ),
    nnx_section(
        "nnx-matched-twice",
        lambda: shard_modules(sharded(), nnx.Linear, "fsdp"),
        ValueError,
        "'…' matches where=…",
        "'first' matches ",
        "and one before it; shard a module once",
    ),
    nnx_section(
        "nnx-linen-within", of_linen, ValueError, "'…' matches where=…", "under nnx.bridge.ToNNX. Shard that: "
    ),
    wrapping(
        "nnx-instance",
        lambda: shard_modules(Model(nnx.Rngs(0)), nnx.Linear, "fsdp"),
        TypeError,
        "shard_modules takes a Linen module",
        "not a Model. For flax.nnx: shard_modules(nnx_model",
    ),
    *[
        wrapping(
            f"nnx-where-{name}",
            lambda where=where: sharded(where=where),
            TypeError,
            "where is …: pass a module class",
            "pass a module class (nn.Dense, nnx.Linear) or a tuple",
        )
        for name, where in [("size", larger_than(100)), ("linen", nn.Dense), ("empty", ())]
    ],
    nnx_section(
        "nnx-no-variables",
        lambda: sharded().apply({"params": {}}, X),
        ValueError,
        "the variables have no '…'",
        "the variables have no 'params/first/bias', which the model has",
    ),
    nnx_section(
        "nnx-without-mesh",
        lambda: nnx_value_and_grad(lambda net, x: net(x).mean())(Model(nnx.Rngs(0)), X),
        ValueError,
        "nnx_value_and_grad: … was not made by create_nnx_module",
        "Model was not made by ",
        "pass mesh=",
    ),
    nnx_section(
        "nnx-wrt-nothing",
        lambda: nnx_value_and_grad(lambda net, x: net(x).mean(), wrt=nnx.LoRAParam, mesh=MESH)(Model(nnx.Rngs(0)), X),
        ValueError,
        "nnx_value_and_grad: wrt=… selects no variable",
        "LoRAParam",
        "of Model. Pass the filter of nnx.Optimizer",
    ),
    nnx_section(
        "nnx-rows",
        lambda: nnx_value_and_grad(lambda net, x: net(x).mean(), mesh=MESH)(Model(nnx.Rngs(0)), X[:3]),
        ValueError,
        "nnx_value_and_grad: argument … after the module has shape",
        "argument 0 after the module has shape (3, ",
        "do not divide its 3 rows. Pad the rows to ",
    ),
    nnx_section(
        "nnx-legacy-key",
        lambda: nnx_value_and_grad(lambda net, x, key: net(x).mean(), mesh=MESH)(
            Model(nnx.Rngs(0)), X, jax.random.PRNGKey(0)
        ),
        ValueError,
        "nnx_value_and_grad: argument … after the module is uint32[2]",
        "argument 1 after the module is uint32[2], as a key of jax.random.PRNGKey",
        "Pass a key of jax.random.key",
    ),
    nnx_section(
        "nnx-metric",
        lambda: nnx_value_and_grad(lambda net, x: net(x).mean(), mesh=MESH)(Measured(nnx.Rngs(0)), X),
        ValueError,
        "nnx_value_and_grad: loss_fn updates an nnx.Metric",
        "the variable 'metric.count'",
        "Return the values as auxiliary output",
    ),
    nnx_section(
        "nnx-rows-of-arguments",
        lambda: nnx_value_and_grad(lambda net, x, w: (w * net(x)).mean(), mesh=MESH)(Model(nnx.Rngs(0)), X, X[:8]),
        ValueError,
        "nnx_value_and_grad: argument … after the module has … rows",
        "argument 1 after the module has 8 rows, of shape (8, ",
        "let loss_fn close over any other array",
    ),
    nnx_section(
        "nnx-aux-shape",
        lambda: nnx_value_and_grad(lambda net, x: (net(x).mean(), jnp.ones(97)), has_aux=True, mesh=MESH)(
            Model(nnx.Rngs(0)), X
        ),
        ValueError,
        "nnx_value_and_grad: has_aux=True returned an array",
        "of shape (97,), and a device has ",
    ),
    nnx_section(
        "nnx-random-numbers",
        lambda: nnx_model(lambda rngs: nnx.Dropout(0.5, rngs=rngs)).apply({}, X),
        ValueError,
        "'…' draws random numbers",
        "'rngs/key' draws ",
        "stream 'default', ",
        "pass rngs={'default': key}",
    ),
    nnx_section("nnx-writes", writes, ValueError, "the model writes a parameter", "by the optimizer"),
    nnx_section(
        "nnx-other-dim",
        lambda: sharded(Other).init(KEY, X),
        ValueError,
        "'…' of shape … is seen by its module",
        "'layers/",
        "Scan over dim 0",
    ),
    nnx_section(
        "nnx-bind-padded", bound(uneven="pad"), ValueError, "bind: '…' is stored with padding", "make_train_step"
    ),
    nnx_section(
        "nnx-bind-frozen",
        bound(trainable=False),
        ValueError,
        "bind: '…' is frozen",
        "which nnx.Optimizer does not support",
    ),
    # ----- kernels
    losses(
        "kernel-by-index",
        lambda: shaped(
            typed_kernel(by_index), jnp.ones((8, 8)), mesh=mesh_of(1, 8), in_specs=P("fsdp"), out_specs=P("fsdp")
        ),
        ValueError,
        "typed_kernel: … contains",
        "typed_kernel: by_index contains axis_index",
    ),
    losses(
        "kernel-closes-over",
        lambda: shaped(
            lambda x, y: typed_kernel(lambda x: x * y)(x),
            jnp.ones((32, 8)),
            jnp.ones((16, 8)),
            in_specs=(P("fsdp"), P("dp")),
            out_specs=P(AXES),
        ),
        ValueError,
        "typed_kernel: … closes over an array that varies",
        "<lambda> closes over an array that varies over ['dp']",
    ),
]
