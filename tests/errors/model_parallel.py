"""Errors of tensor and sequence parallelism, of long contexts and of experts."""

from functools import partial

from flax import nnx

from tests.errors.shared import KEY, P, create, jax, jnp, make_train_step, nn, np, optax, shaped
from tests.errors.table import Section
from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_train_state,
    init_sharded,
    partition_specs,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.device_mesh import from_zigzag, to_zigzag
from xlstm_jax.distributed.model_parallel import (
    ColumnDense,
    Experts,
    RowDense,
    SplitAttention,
    SplitEmbed,
    columns_of,
    context_attention,
    context_positions,
    in_layout,
    on_split_input,
    recurrence_over_axis,
    scan_over_axis,
    split_modules,
    split_tokens,
)
from xlstm_jax.distributed.model_parallel.sequence_layout import ReorderedTokens

tensor, contexts, names = map(Section, ["Tensor and sequence parallelism", "Long contexts and experts", "Axis names"])
SGD, WHOLE, SPLIT = optax.sgd(0.1), P(), P("dp", "cp")
TP4, TP8 = {"fsdp": 2, "tp": 4}, {"tp": 8}
RING = {"ring": True, "sequence_dim": 1}
PAIRS = create({"fsdp": 4, "tp": 2})


def shown(layer, x, sizes=TP4, spec=WHOLE, dtype=jnp.float32):
    """Returns a call that initialises on a mesh with these axes and applies inside ``shard_map``, by tracing only."""

    def call():
        mesh, given = create(sizes), jax.ShapeDtypeStruct(x, dtype)
        params = jax.eval_shape(partial(init_sharded, layer, mesh, KEY, batch_axes="tp"), given)
        in_specs = (partition_specs(params, mesh), spec)
        jax.eval_shape(jax.shard_map(layer.apply, mesh=mesh, in_specs=in_specs, out_specs=P()), params, given)

    return call


def named(*names):
    return nn.with_partitioning(nn.initializers.lecun_normal(), names)


class Pair(nn.Module):
    """Two different layers with the same input."""

    @nn.compact
    def __call__(self, x):
        return columns_of([ColumnDense(8, name="a"), ColumnDense(8, dtype=jnp.bfloat16, name="b")], x)


def two_roles(layer):
    """Returns a call with a layer wrapped over the axis that already splits the layer."""

    def call():
        mesh, x, axes = DeviceMeshManager.create_abstract_mesh({"fsdp": 2, "tp": 4}), jnp.ones((8, 8)), ("fsdp", "tp")
        model = shard_modules(nn.Sequential([layer]), type(layer), axes, 8)
        of_batch = axes if isinstance(layer, Experts) else "fsdp"
        state = abstract_train_state(model, SGD, mesh, KEY, x, batch_axes=of_batch, allow_replicated=True)
        step = make_train_step(
            lambda p, apply, x, rng: apply({"params": p}, x).sum(), mesh, of_batch, allow_replicated=True
        )
        jax.eval_shape(step, state, x, KEY)

    return call


def tokens_split(spec, dim):
    split = partial(split_tokens, dim=dim, axis_name="tp")
    return lambda: shaped(
        split, jnp.ones((4, 8, 3)), mesh=create({"tp": 4}, jax.devices()[:4]), in_specs=spec, out_specs=spec
    )


def batch_over_tp():
    x = jnp.ones((8, 4, 6))
    state = abstract_train_state(ColumnDense(16), SGD, PAIRS, KEY, x, batch_axes="fsdp", allow_replicated=True)
    loss_fn = lambda params, apply_fn, x, rng: apply_fn({"params": params}, x).mean()  # noqa: E731
    make_train_step(loss_fn, PAIRS, ("fsdp", "tp"), allow_replicated=True).trace(state, x, KEY)


def unbound():
    """Applies a layer inside a ``shard_map`` over other axes."""
    shaped(lambda x: ColumnDense(8, axis_name="model").apply({"params": {}}, x), jnp.ones((2, 4)))


class Layers(nn.Module):
    """Three layers whose products depend on unsharded inputs."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="up")(x)
        x = nn.Dense(16, name="mid")(x)
        return nn.Dense(8, name="down")(x)


class Scaled(nn.Module):
    """Two layers, and between them a scale whose dim has a logical name."""

    @nn.compact
    def __call__(self, x):
        ones = nn.with_logical_partitioning(nn.initializers.ones, ("norm", "norm2"))
        h = nn.Dense(16, name="up")(x)
        return nn.Dense(8, name="down")(h * nn.Embed(2, 1, embedding_init=ones, name="scale")(jnp.zeros((), int)))


class Between(nn.Module):
    """A norm between two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="down")(nn.LayerNorm(name="norm")(nn.Dense(16, name="up")(x)))


def split(model, how, x=(8, 8), check_vma=True, rules=()):
    """Returns a call that splits the layers of a model and applies the model on a mesh, by tracing only."""

    def call():
        given = jax.ShapeDtypeStruct(x, jnp.float32)
        layers = split_modules(model, how)
        with nn.logical_axis_rules(rules):
            params = jax.eval_shape(partial(init_sharded, layers, PAIRS, KEY, batch_axes="fsdp"), given)
        in_specs = partition_specs(params, PAIRS), P("fsdp")
        apply = jax.shard_map(layers.apply, mesh=PAIRS, in_specs=in_specs, out_specs=P("fsdp"), check_vma=check_vma)
        jax.eval_shape(apply, params, given)

    return call


def init(model, x):
    return lambda: jax.eval_shape(model().init, KEY, x)


def embedding(how):
    return lambda: split_modules(nn.Embed(8, 4), how)


# ----- contexts

SEQUENCE = create({"dp": 2, "cp": 4})
QUERY = jnp.zeros((2, 16, 8, 4))


def attended(tokens=4, heads=8, key_tokens=4, key_heads=2, **options):
    query, key = jnp.zeros((1, tokens, heads, 4)), jnp.zeros((1, key_tokens, key_heads, 4))
    fn = lambda query, key: context_attention(query, key, key, **options)  # noqa: E731
    return lambda: shaped(fn, query, key, mesh=SEQUENCE, check_vma=False)


def within(fn):
    """Returns a call of a function of tokens in zigzag layout."""

    def call(x):
        with in_layout(x, "zigzag") as x:
            return fn(x)

    spec = P("dp", "cp")
    return lambda: shaped(call, QUERY, mesh=SEQUENCE, in_specs=spec, out_specs=spec)


def laid_out(layout="zigzag", spec=SPLIT, **leaves):
    """Returns a call with a batch whose leaves are given as (layout, devices, tokens)."""

    def local(batch):
        with in_layout(batch, layout):
            return jnp.zeros(())

    arrays = {name: (jnp.zeros((2, size)), how, devices) for name, (how, devices, size) in leaves.items()}
    batch = {name: ReorderedTokens(x, how, devices) if how else x for name, (x, how, devices) in arrays.items()}
    return lambda: shaped(local, batch, mesh=SEQUENCE, in_specs=spec, check_vma=False)


class OfTokens(nn.Module):
    """Attention over the tokens of a step, or positions alone."""

    layout: str | None = None
    recurrence: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8, 8)(tokens.astype(int)) + context_positions(tokens.shape[1], "cp")[:, None]
        if self.recurrence:
            y = recurrence_over_axis(x.swapaxes(0, 1), x.swapaxes(0, 1), "cp").swapaxes(0, 1)
            return y.mean()
        q = x.reshape(*x.shape[:2], 2, 4)
        return context_attention(q, q, q, "cp", layout=self.layout).mean()


CP = create({"fsdp": 4, "cp": 2})
BATCH = {"x": np.arange(128.0).reshape(8, 16)}


def stepped(model, batch=BATCH, check_vma=True, **options):
    options = options or {"batch_spec": P("fsdp", "cp")}
    loss_fn = lambda params, apply_fn, batch, rng: apply_fn({"params": params}, batch["x"])  # noqa: E731

    def call():
        step = make_train_step(loss_fn, CP, allow_replicated=True, check_vma=check_vma, **options)
        given = jax.ShapeDtypeStruct((4, 8), jnp.float32)
        state = abstract_train_state(OfTokens(), SGD, CP, KEY, given, batch_axes=("fsdp",), allow_replicated=True)
        step.trace(state.replace(apply_fn=model.apply), batch, KEY)

    return call


# ----- experts


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(8)(x)))


X = jnp.ones((16, 4, 8))


def experts(shape=None, axes=("ep",), x=X, check_vma=True, **options):
    options = {"num_experts": 8, "top_k": 2, **options}
    model = Experts(MLP(), **options)

    def call():
        if shape is None:
            return jax.eval_shape(model.init, KEY, x)
        mesh = create(shape, jax.devices()[: int(np.prod(list(shape.values())))])
        params = unbox(jax.eval_shape(Experts(MLP(), options["num_experts"], 2).init, KEY, x))
        fn = lambda params, x: model.apply(params, x)  # noqa: E731
        return jax.eval_shape(
            jax.shard_map(fn, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(axes), check_vma=check_vma), params, x
        )

    return call


def experts_in_a_step(**options):
    mesh = create({"dp": 1, "ep": 2}, jax.devices()[:2])
    model = Experts(MLP(), 8, 2, **options)
    loss_fn = lambda params, apply_fn, x, rng: jnp.mean(apply_fn({"params": params}, x) ** 2)  # noqa: E731

    def call():
        state = abstract_train_state(model, SGD, mesh, KEY, X, batch_axes=("dp", "ep"), allow_replicated=True)
        make_train_step(loss_fn, mesh, ("dp", "ep"), check_vma=False, allow_replicated=True).trace(state, X, KEY)

    return call


BY_ROWS = {"batch_axes": ("fsdp", "cp")}
ROWS = [
    # ----- split layers
    tensor(
        "split-heads",
        shown(SplitAttention(12, 2), (2, 8, 4), TP8),
        ValueError,
        "'…' of shape … is to be split along dim …",
        "'query/kernel' of shape (4, 12, 2)",
        "12, which the 8 devices",
        "16",
    ),
    tensor(
        "split-features",
        shown(ColumnDense(30), (2, 4)),
        ValueError,
        "'…' of shape … is to be split along dim …",
        "'kernel' of shape (4, 30)",
        "dim 1, of size 30, ",
        "the 4 devices",
        "32",
    ),
    tensor(
        "split-key-heads",
        shown(SplitAttention(24, 2, 3), (2, 8, 4)),
        ValueError,
        "…: … heads are to be copied to the … devices along …",
        "'key': 3 heads are to be copied to the 4 devices",
        "Take 6",
    ),
    tensor(
        "split-groups",
        shown(SplitAttention(8, 2, 3), (2, 8, 4), TP8),
        ValueError,
        "…: num_kv_heads=… key heads do not divide num_heads=…",
        "num_kv_heads=3 key heads do not divide num_heads=8",
    ),
    tensor(
        "split-vocabulary",
        shown(SplitEmbed(50, 2), (2, 8), dtype=jnp.int32),
        ValueError,
        "'…' of shape … is to be split along dim …",
        "'embedding' of shape (50, 2)",
        "the 4 devices along 'tp'",
        "52",
    ),
    tensor(
        "split-axis",
        shown(ColumnDense(8, axis_name="model"), (2, 4)),
        ValueError,
        "…: … is not an axis of the mesh, which has …",
        "'model' is not an axis of the mesh, which has ('fsdp'",
    ),
    tensor(
        "split-last-dims",
        shown(ColumnDense(8, axis=0), (2, 4)),
        ValueError,
        "…: axis=… are not the last dims of an input of shape …",
        "axis=0",
        "(2, 4)",
    ),
    tensor(
        "split-ring-alone",
        shown(ColumnDense(8, ring=True), (2, 4)),
        ValueError,
        "…: ring=True hides the gather or the scatter of tokens",
        "without sequence_dim=",
    ),
    tensor(
        "split-length",
        shown(RowDense(8, sequence_dim=1), (2, 6, 8), spec=P(None, None, "tp")),
        ValueError,
        "…: dim … of an array of shape … has … tokens, which the … devices along …",
        "dim 1 of",
        "6 tokens",
        "4 devices",
        "8.",
    ),
    tensor(
        "split-dim",
        shown(ColumnDense(8, sequence_dim=2), (2, 8, 8)),
        ValueError,
        "…: dim … is no dim of tokens of an array of shape …",
        "dim 2 is no dim",
        "from 0 to 1",
    ),
    tensor(
        "split-ring-dim",
        shown(ColumnDense(8, ring=True, sequence_dim=2), (2, 8, 8)),
        ValueError,
        "…: dim … is no dim of tokens of an array of shape …",
        "dim 2 is no dim",
    ),
    tensor(
        "split-whole-tokens",
        shown(ColumnDense(8, sequence_dim=1), (2, 8, 8)),
        ValueError,
        "…: an input of shape … is equal along … by its type, so each device has all tokens",
        "'tp'",
        "4 times",
    ),
    tensor(
        "split-whole-tokens-ring",
        shown(ColumnDense(8, **RING), (2, 8, 8)),
        ValueError,
        "…: an input of shape … is equal along … by its type, so each device has all tokens",
        "'tp'",
        "4 times",
    ),
    tensor(
        "split-unlike",
        shown(Pair(), (2, 8)),
        ValueError,
        "columns_of: … has …=…, and … has",
        "'a' has dtype=None, and 'b' has <class 'jax.numpy.bfloat16'>. Layers of the same input",
    ),
    tensor(
        "split-dim-taken",
        shown(ColumnDense(8, kernel_init=named(None, "fsdp")), (2, 8)),
        ValueError,
        "'…' is split along dim … over … by its layer",
        "'kernel' is split along dim 1 over 'tp'",
        "are (None, 'fsdp')",
    ),
    tensor(
        "split-axis-taken",
        shown(ColumnDense(8, kernel_init=named("tp", None)), (2, 8)),
        ValueError,
        "'…' is split along dim … over … by its layer",
        "are ('tp', None)",
    ),
    tensor(
        "split-rows-of-whole",
        shown(RowDense(8), (2, 8)),
        ValueError,
        "… is split by rows, and its input of shape",
        "all 8 features",
        "not the 2 of each of the 4 devices",
        "'column'",
    ),
    tensor(
        "split-columns-of-split",
        shown(nn.Sequential([ColumnDense(8), ColumnDense(8)]), (2, 4)),
        ValueError,
        "… is split by columns, and its input of shape",
        "'layers_1'",
        "2 of the 8 features",
        "RowDense",
    ),
    tensor(
        "split-fused",
        shown(ColumnDense((3, 8, 2)), (2, 4)),
        ValueError,
        "… has the features …, and a column-split layer",
        "features (3, 8, 2)",
        "of 3, over the 4",
        "3 layers (queries, keys and values) of features (8, 2)",
        "first: (8, 3, 2);",
    ),
    tensor(
        "split-fused-heads",
        shown(ColumnDense((3, 6, 2)), (2, 4)),
        ValueError,
        "… has the features …, and a column-split layer",
        "first: (6, 3, 2), with a multiple of 4 in pl",
    ),
    tensor(
        "split-gate-and-up",
        shown(ColumnDense((2, 8)), (2, 4)),
        ValueError,
        "… has the features …, and a column-split layer",
        "2 layers (keys and values) of features 8",
        "first: (8, 2);",
        "take 1 or 2",
    ),
    tensor(
        "split-more-devices",
        shown(ColumnDense((4, 2)), (2, 4), TP8),
        ValueError,
        "'…' of shape … is to be split along dim …",
        "of size 4",
        "as 8",
        "along 'tp': 1, 2 or 4",
    ),
    tensor(
        "split-and-gathered",
        two_roles(ColumnDense(8)),
        ValueError,
        "'…' of shape … is unsharded on each of the … devices",
        "'layers_0/kernel' of shape (8, 8) is unsharded on each of the 4 devices along 'tp'",
    ),
    contexts(
        "experts-and-gathered",
        two_roles(Experts(nn.Dense(8), 4, 1, axis="tp")),
        ValueError,
        "Experts: a device has parameters of",
        "leave the experts' axis out of the axis_name of the wrapper",
    ),
    tensor(
        "split-instance",
        lambda: on_split_input(nn.LayerNorm(), "tp"),
        TypeError,
        "on_split_input takes a class of Linen modules",
        "as nn.LayerNorm, not",
    ),
    tensor(
        "split-float-tokens",
        lambda: SplitEmbed(4, 2).init(KEY, jnp.ones(3)),
        TypeError,
        "…: tokens are …, and must be integers",
        "float32",
    ),
    tensor(
        "split-tokens-that-are",
        tokens_split(P("tp"), 1),
        ValueError,
        "…: an input of shape … differs along …",
        "split_tokens: an input of shape (1, 8, 3) differs along 'tp' by its type",
    ),
    tensor(
        "split-tokens-dim",
        tokens_split(P(), 3),
        ValueError,
        "…: dim … is no dim of tokens of an array of shape …",
        "split_tokens: dim 3 is no dim of tokens of an array of shape (4, 8, 3); pass one from 0 to 2",
    ),
    tensor(
        "split-axis-of-batch",
        batch_over_tp,
        ValueError,
        "…: … splits this layer, and the loss is averaged over",
        "'tp' splits this layer, and the loss is averaged over ('fsdp', 'tp')",
    ),
    names(
        "split-axis-unbound", unbound, ValueError, "…: … is not a bound mesh axis", "'model' is not a bound mesh axis"
    ),
    tensor(
        "split-sum-of-equal",
        lambda: shaped(
            lambda x: RowDense(8).apply({"params": {"kernel": jnp.ones((2, 8)), "bias": jnp.ones(8)}}, x),
            jnp.ones((2, 2)),
            mesh=create({"tp": 4}, jax.devices()[:4]),
        ),
        ValueError,
        "…: an input of shape … is equal along … by its type, and would count",
        "'tp'",
        "4 times",
    ),
    # ----- split modules
    *[
        tensor(f"modules-{name}{suffix}", split(Layers(), how, check_vma=check_vma), ValueError, words, *says)
        for check_vma, suffix in [(True, ""), (False, "-without-types")]
        for name, how, words, *says in [
            (
                "swapped",
                {"up": "row", "mid": "column"},
                "split_modules: '…' is split by rows, and its input",
                "'up' is split by rows",
                "all 8 ",
                "'up' by 'column' and 'mid', which runs after it, by 'row'",
            ),
            (
                "rows-alone",
                {"mid": "row"},
                "split_modules: '…' is split by rows, and its input",
                "'mid' is split by rows",
                "all 16 ",
                "the layer before 'mid' by 'column'",
            ),
            (
                "rows-after-rows",
                {"up": "column", "mid|down": "row"},
                "split_modules: '…' is split by rows, and its input",
                "'down' is split by rows",
                "a row-split layer runs in between",
            ),
            (
                "columns-alone",
                {"up": "column"},
                "split_modules: '…' is not split, and runs",
                "'mid' is not split",
                "'up' returned",
                "8 of 16 ",
                "Split 'mid' by 'row'",
            ),
            (
                "columns-twice",
                {"up|mid": "column", "down": "row"},
                "split_modules: '…' is split by columns, and runs",
                "'mid' is split by col",
                "Split 'mid' by 'row'",
            ),
            (
                "head-after-columns",
                {"up": "column", "mid": "vocabulary"},
                "split_modules: '…' is split by columns, and runs",
                "'mid' is split by ",
                ", or leave 'up' out of s",
            ),
        ]
    ],
    tensor(
        "modules-between",
        split(Between(), {"up": "column", "down": "row"}, check_vma=False),
        ValueError,
        "split_modules: '…' (…) has replicated parameters",
        "'norm' (LayerNorm) has replicated parameters, and runs after 'up' is split by",
    ),
    tensor(
        "modules-between-by-rules",
        split(Scaled(), {"up": "column", "down": "row"}, rules=(("norm", "tp"),)),
        ValueError,
        "split_modules: '…' (…) runs on features",
        "'scale' (Embed) runs on features that are split over 'tp'",
        "Map the name of the dim to None",
    ),
    tensor(
        "modules-class",
        init(lambda: split_modules(nn.Sequential([nn.Embed(8, 4)]), {"layers_0": "column"}), jnp.ones(3, int)),
        ValueError,
        "split_modules: '…' is of the class …, and … is for …",
        "'layers_0' is of the class Embed, and 'column' is for 'Dense', 'DenseG",
    ),
    tensor(
        "modules-kind",
        lambda: split_modules(Layers(), {"up": "columns"}),
        ValueError,
        "split_modules: … is none of 'column', 'row'",
        "'columns' is none of 'column', 'row', 'vocabulary', 'inside' and 'replicated'",
    ),
    tensor(
        "split-modules-function",
        lambda: split_modules(jnp.sin, {"up": "column"}),
        TypeError,
        "split_modules takes a Linen module or its class",
    ),
    tensor(
        "split-modules-nnx",
        lambda: split_modules(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), {"up": "column"}),
        TypeError,
        "split_modules takes a Linen module or its class",
        "For flax.nnx: split_modules(nnx_model(lambda rngs: ",
    ),
    tensor(
        "modules-fused",
        split(nn.Sequential([nn.DenseGeneral((2, 4, 8))]), {"layers_0": "column"}),
        ValueError,
        "… has the features …, and a column-split layer",
        "'layers_0' has the features (2, 4, 8)",
        "2 devices along 'tp': one for",
    ),
    tensor(
        "modules-no-match",
        init(lambda: split_modules(Layers(), {"upp": "column"}), jnp.ones((8, 8))),
        ValueError,
        "split_modules: … matches none of the … of",
        "'upp' matches none of the dense layers of Layers: 'down', 'mid'",
    ),
    tensor(
        "modules-no-match-inside",
        init(lambda: split_modules(Layers(), {"up": "column", "norm": "inside"}), jnp.ones((8, 8))),
        ValueError,
        "split_modules: … matches none of the … of",
        "'norm' matches none of the modules of Layers: ",
    ),
    tensor(
        "modules-own-product",
        init(
            lambda: split_modules(
                nn.Sequential([nn.Dense(4, dot_general=partial(jax.lax.dot_general))]), {"layers_0": "column"}
            ),
            jnp.ones((8, 8)),
        ),
        ValueError,
        "split_modules: '…' has …",
        "'layers_0' has dot_general=",
        "Leave this layer out of split=",
    ),
    # ----- long contexts
    contexts("context-impl", attended(impl="flash"), ValueError, "impl=…: context_attention has", "impl='flash'"),
    contexts(
        "context-layout",
        attended(layout="striped"),
        ValueError,
        "layout=…: pass 'contiguous'",
        "layout='striped'",
    ),
    contexts(
        "context-ulysses",
        attended(impl="ulysses", heads=6),
        ValueError,
        "impl='ulysses': the … query heads",
        "6 query heads do not divide over the 4 devices along ('cp',)",
    ),
    contexts(
        "context-groups",
        attended(key_heads=3),
        ValueError,
        "… query heads do not divide into groups",
        "8 query heads do not divide into groups for 3 key heads",
    ),
    contexts(
        "context-shapes",
        attended(key_tokens=3),
        ValueError,
        "query, key and value have the shapes",
        "(1, 4, 8, 4), (1, 3, 2, 4)",
    ),
    contexts(
        "context-kernel",
        attended(impl="ring", kernel=jax.nn.dot_product_attention),
        ValueError,
        "kernel= with impl='ring'",
    ),
    contexts("context-window", attended(window=(-1, 0)), ValueError, "window=…: how many tokens", "window=(-1, 0)"),
    contexts(
        "context-segments",
        attended(segment_ids=jnp.zeros(4, int)),
        ValueError,
        "segment_ids of shape … do not fit a query",
        "segment_ids of shape (4,) do not fit a query of shape (1, 4, 8, 4)",
    ),
    contexts(
        "context-block",
        attended(impl="ring", block_size=0),
        ValueError,
        "context_attention: block_size=…",
        "block_size=0",
    ),
    contexts(
        "context-layout-of-nothing",
        attended(layout="zigzag"),
        ValueError,
        "…: layout='zigzag', and nothing says",
        "layout='zigzag', and nothing says that the tokens over 'cp' are laid out so",
    ),
    names(
        "context-axis",
        attended(axis="sp"),
        ValueError,
        "…: … is not a bound mesh axis",
        "context_attention: 'sp' is not a bound mesh axis; the axes bound here",
    ),
    contexts(
        "context-same-tokens",
        lambda: shaped(lambda x: context_attention(x, x, x), QUERY, mesh=SEQUENCE, in_specs=P("dp"), out_specs=P("dp")),
        ValueError,
        "context_attention: the … does not vary",
        "the query does not vary over 'cp'",
    ),
    contexts(
        "context-says-contiguous",
        within(lambda x: context_attention(x, x, x, layout="contiguous")),
        ValueError,
        "… is …, and the tokens of this step lie",
        "context_attention is given layout='contiguous', and the tokens of this step lie zigzag",
    ),
    contexts(
        "positions-say-contiguous",
        within(lambda x: context_positions(4, "cp", "contiguous")),
        ValueError,
        "… is …, and the tokens of this step lie",
        "context_positions is given layout='contiguous', and the tokens",
    ),
    contexts(
        "context-says-zigzag-elsewhere",
        within(lambda x: context_attention(x, x, x, "dp", layout="zigzag")),
        ValueError,
        "… is …, and the tokens of this step lie",
        "context_attention is given layout='zigzag', and the tokens of this step lie contiguous over 'dp'",
    ),
    contexts(
        "positions-over-others",
        within(lambda x: context_positions(4, ("dp", "cp"))),
        ValueError,
        "… over …: the tokens of this step are laid out",
        "context_positions over ('dp', 'cp'): the tokens of this step are laid out in zigzag over 'cp'",
    ),
    contexts(
        "positions-do-not-divide",
        within(lambda x: context_positions(3)),
        ValueError,
        "…: … tokens do not divide into the … chunks",
        "context_positions: 12 tokens do not divide into the 8 chunks",
    ),
    contexts(
        "recurrence-in-zigzag",
        within(lambda x: recurrence_over_axis(x[0], x[0])),
        ValueError,
        "… is …, and the tokens of this step lie",
        "recurrence_over_axis is of tokens that lie contiguous, and ",
        "zigzag over 'cp'. Make the step with",
    ),
    contexts(
        "scan-in-zigzag",
        within(lambda x: scan_over_axis(jnp.maximum, x, first=x)),
        ValueError,
        "… is …, and the tokens of this step lie",
        "scan_over_axis is of tokens that lie contiguous",
    ),
    contexts(
        "laid-out-as-an-array",
        within(lambda x: jnp.sin(ReorderedTokens(x, "zigzag", 4))),
        ValueError,
        "an array of shape … in … order",
        "(1, 4, 8, 4) in zigzag order is used as",
    ),
    contexts(
        "laid-out-indexed",
        within(lambda x: ReorderedTokens(x, "zigzag", 4)[0]),
        ValueError,
        "an array of shape … in … order",
        "in zigzag order is used as an array",
    ),
    contexts(
        "laid-out-for-others",
        laid_out(x=("zigzag", 2, 16)),
        ValueError,
        "… of shape … is laid out in",
        "batch['x'] of shape (1, 4) is laid out in zigzag for 2 devices, and 4 split",
    ),
    contexts(
        "laid-out-otherwise",
        laid_out("contiguous", x=("zigzag", 4, 16)),
        ValueError,
        "… of shape … is laid out in",
        "batch['x'] of shape (1, 4) is laid out in zigzag, and the layout here is layout='contiguous'",
    ),
    contexts(
        "laid-out-does-not-divide",
        laid_out(x=(None, 0, 20)),
        ValueError,
        "…: … tokens do not divide into the … chunks",
        "in_layout: batch['x']: 20 tokens do not divide into the 8 chunks",
        "to 24 tokens",
    ),
    contexts(
        "laid-out-other-lengths",
        laid_out(x=(None, 0, 16), y=(None, 0, 20)),
        ValueError,
        "in_layout: … has … entries along dim",
        "in_layout: batch['y'] has 5 entries along dim 1, and 'x' 4 tokens",
    ),
    contexts(
        "zigzag-back-negative-dim",
        lambda: from_zigzag(to_zigzag(np.zeros((2, 24)), 3, dim=-1), 4, dim=-1),
        ValueError,
        "from_zigzag(batch, …): … of shape",
        "from_zigzag(batch, 4): batch of shape (2, 24) is laid out for 3 devices",
    ),
    contexts(
        "step-attention-over-rows",
        stepped(OfTokens(), **BY_ROWS),
        ValueError,
        "… over …: the step splits rows",
        "context_positions over 'cp': the step splits rows",
        "over ('fsdp', 'cp')",
        "by batch_spec=P('fsdp', 'cp')",
    ),
    contexts(
        "step-rows-laid-out",
        stepped(OfTokens(), to_zigzag(BATCH, 2), **BY_ROWS),
        ValueError,
        "… of shape … is laid out in",
        "for 2 devices, and its dim 1 is not split",
    ),
    contexts(
        "step-laid-out-for-others",
        stepped(OfTokens(), to_zigzag(BATCH, 4)),
        ValueError,
        "… of shape … is laid out in",
        "laid out in zigzag for 4 devices, and 2 split its dim 1",
    ),
    contexts(
        "recurrence-shapes",
        lambda: recurrence_over_axis(jnp.ones(2), jnp.ones((2, 3))),
        ValueError,
        "recurrence_over_axis: decay of shape",
        "decay of shape (2,) and initial of shape (2, 3) do not fit a state",
    ),
    names(
        "recurrence-axis",
        lambda: shaped(lambda x: recurrence_over_axis(x, x, "sp"), jnp.ones((4, 2)), mesh=SEQUENCE, in_specs=P("cp")),
        ValueError,
        "…: … is not a bound mesh axis",
        "recurrence_over_axis: 'sp' is not a bound mesh axis",
    ),
    # ----- experts
    contexts("experts-top-k", experts(top_k=9), ValueError, "top_k=… of … experts", "top_k=9 of 8 experts"),
    contexts(
        "experts-capacity",
        experts(capacity_factor=0.0),
        ValueError,
        "capacity_factor=… leaves no row",
        "capacity_factor=0.0",
    ),
    contexts(
        "experts-groups",
        experts(capacity_factor=1.0, row_groups=3),
        ValueError,
        "row_groups=… does not divide",
        "row_groups=3 does not divide the 64 rows",
    ),
    contexts(
        "experts-block", experts(block_size=0), ValueError, "apply_by_group: block_size=…", "block_size=0 must be"
    ),
    contexts(
        "experts-do-not-divide",
        experts({"ep": 3}, (), X[:3]),
        ValueError,
        "…: … experts do not divide over",
        "8 experts do not divide over the 3 devices along ('ep',)",
    ),
    contexts(
        "experts-of-others",
        experts({"ep": 4}),
        ValueError,
        "Experts: a device has parameters of",
        "a device has parameters of 8 experts, where 2 are needed, 8 over ('ep',)",
    ),
    names(
        "experts-axis",
        experts({"dp": 2}, ("dp",)),
        ValueError,
        "…: … is not a bound mesh axis",
        "Experts: 'ep' is not a bound mesh axis; the axes bound here",
    ),
    contexts(
        "experts-tokens",
        experts({"dp": 1, "ep": 4}, ("dp",), jnp.ones((3, 2, 8))),
        ValueError,
        "Experts: the … tokens of a device",
        "the 6 tokens of a device do not divide over the 4 devices",
    ),
    contexts(
        "experts-batch-axes",
        experts({"dp": 2, "ep": 4}, ("dp",), batch_axes=("dp", "ep")),
        ValueError,
        "Experts(batch_axes=…): by their type",
        "batch_axes=('dp', 'ep')",
        "tokens are the same along",
    ),
    contexts(
        "experts-without-types",
        experts({"ep": 2}, check_vma=False),
        ValueError,
        "Experts(axis=…): under check_vma=False",
        "Experts(axis='ep')",
        "the step names no batch axes",
    ),
    contexts(
        "experts-other-batch",
        experts_in_a_step(batch_axes="dp"),
        ValueError,
        "Experts(batch_axes=…): the step's batch",
        "batch_axes='dp'): the step's batch is split over ('dp', 'ep')",
    ),
]
