"""Programs in the manner of JAX's and Flax's own guides, sharded by at most three changed lines.

Each program trains as its guide does: under ``jax.jit`` or ``nnx.jit``, with shardings of its arrays on eight devices.
The same program with the changed lines is run without a mesh that is set, and under ``jax.set_mesh`` with ``Auto`` and
with explicit axes; both have the same losses and parameters. The comparison counts the changed lines.
"""

import dataclasses
import difflib

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from xlstm_jax.distributed import unbox
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, path_string

MOST_LINES = 3

# ------------------------------------------------------------------------------------ Flax: the first program, an image

MNIST = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from functools import partial

mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.NamedSharding(mesh, jax.P("fsdp"))

class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.drop1 = nnx.Dropout(0.0, rngs=rngs)
        self.conv2 = nnx.Conv(8, 64, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, rngs=rngs)
        self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(256, 512, rngs=rngs)
        self.drop2 = nnx.Dropout(0.0, rngs=rngs)
        self.linear2 = nnx.Linear(512, 10, rngs=rngs)

    def __call__(self, x):
        x = self.pool(nnx.relu(self.norm1(self.drop1(self.conv1(x)))))
        x = self.pool(nnx.relu(self.norm2(self.conv2(x))))
        return self.linear2(self.drop2(nnx.relu(self.linear1(x.reshape(x.shape[0], -1)))))

model = CNN(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9, eps=1e-2), wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

@nnx.jit
def train_step(model, optimizer, metrics, batch):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)

@nnx.jit
def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])

@nnx.jit
def pred_step(model, batch):
    return model(batch["image"]).argmax(axis=1)

rng = np.random.default_rng(0)
def images(count):
    scale = (1 + np.arange(count) % 3)[:, None, None, None]
    batch = {"image": rng.normal(size=(count, 8, 8, 1)) * scale, "label": rng.integers(0, 10, count)}
    return jax.device_put(jax.tree.map(lambda x: np.asarray(x, np.int32 if x.ndim == 1 else np.float32), batch), rows)

history = []
for step in range(4):
    model.train()
    train_step(model, optimizer, metrics, images(32))
    if step % 2 == 1:
        history.append({f"train_{name}": float(value) for name, value in metrics.compute().items()})
        metrics.reset()
        model.eval()
        for _ in range(2):
            eval_step(model, metrics, images(16))
        history.append({f"test_{name}": float(value) for name, value in metrics.compute().items()})
        metrics.reset()
losses = [value for row in history for value in row.values()]
predicted = np.asarray(pred_step(model, images(16)))
trained = model
"""

# ------------------------------------------------------------------------------------ Flax: scale up on several devices

SCALE_UP = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx

mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
jax.set_mesh(mesh)

class DotReluDot(nnx.Module):
    def __init__(self, depth, rngs):
        init_fn = nnx.initializers.lecun_normal()
        names, rules = ("embed", "hidden"), (("embed", None), ("hidden", "fsdp"))
        up = nnx.with_partitioning(init_fn, names, sharding_rules=rules)
        self.dot1 = nnx.Linear(depth, 2 * depth, kernel_init=up, use_bias=False, rngs=rngs)
        self.w2 = nnx.Param(
            init_fn(rngs.params(), (2 * depth, depth)), out_sharding=names[::-1], sharding_rules=rules
        )

    def __call__(self, x):
        return jnp.dot(jax.nn.relu(self.dot1(x)), self.w2[...])

class MultiDotReluDot(nnx.Module):
    def __init__(self, depth, num_layers, rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def create(rngs):
            return DotReluDot(depth, rngs)

        self.layers = create(rngs)

    def __call__(self, x):
        def one_layer(x, layer):
            return x + layer(x), None

        return jax.lax.scan(one_layer, x, self.layers)[0]

def build(rngs):
    return MultiDotReluDot(64, 3, rngs)

rng = np.random.default_rng(0)
scale = 1 + np.arange(16)[:, None] % 3
x = jax.device_put((rng.normal(size=(16, 64)) * scale).astype(np.float32), jax.NamedSharding(mesh, jax.P("data")))
y = jax.device_put(rng.normal(size=(16, 64)).astype(np.float32), jax.NamedSharding(mesh, jax.P("data")))

model = nnx.jit(build)(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3, eps=1e-2), wrt=nnx.Param)

@jax.jit
def train_step(model, optimizer, x, y):
    def loss_fn(model, x, y):
        return jnp.mean((y - model(x)) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return model, optimizer, loss

losses = []
for _ in range(3):
    model, optimizer, loss = train_step(model, optimizer, x, y)
    losses.append(float(loss))
trained = model
"""

# ------------------------------------------------------------------------------------------ JAX: shardings in the types

EXPLICIT = """
import jax, jax.numpy as jnp, numpy as np

mesh = jax.make_mesh((8,), ("fsdp",))
jax.set_mesh(mesh)

def init_params(key, sizes=(16, 64, 64, 8)):
    keys = jax.random.split(key, len(sizes))
    pairs = zip(sizes, sizes[1:])
    return [(jax.random.normal(k, (m, n)) * m**-0.5, jnp.zeros(n)) for k, (m, n) in zip(keys, pairs)]

def predict(params, x):
    *hidden, (w, b) = params
    for w_hidden, b_hidden in hidden:
        x = jnp.tanh(x @ w_hidden + b_hidden)
    return x @ w + b

def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((predict(params, x) - y) ** 2)

params = jax.device_put(init_params(jax.random.key(0)), jax.P())

@jax.jit
def update(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

rng = np.random.default_rng(0)
scale = 1 + np.arange(16)[:, None] % 3
batch = (rng.normal(size=(16, 16)) * scale).astype(np.float32), rng.normal(size=(16, 8)).astype(np.float32)
batch = jax.device_put(batch, jax.P("fsdp"))
assert str(jax.typeof(batch[0])) == "float32[16@fsdp,16]"

losses = []
for _ in range(3):
    params, loss = update(params, batch)
    losses.append(float(loss))
trained = params
"""

# ------------------------------------------------------------------------------------- JAX: computations that are split

COMPUTATION = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial

mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
jax.set_mesh(mesh)

def layer(x, weights, bias):
    return jax.nn.sigmoid(jnp.dot(x, weights) + bias)

def mean_error(params, batch):
    h = batch["inputs"]
    for name in ("first", "second"):
        h = layer(h, params[name]["weights"], params[name]["bias"])
    return jnp.mean((h - batch["targets"]) ** 2)

rng = np.random.default_rng(42)
def weights(m, n):
    return {"weights": rng.normal(size=(m, n)).astype(np.float32), "bias": rng.normal(size=n).astype(np.float32)}

params = {"first": weights(32, 64), "second": weights(64, 4)}
params = jax.device_put(params, jax.P())
scale = 1 + np.arange(16)[:, None] % 3
batch = {"inputs": rng.normal(size=(16, 32)) * scale, "targets": rng.uniform(size=(16, 4))}
batch = jax.device_put(jax.tree.map(np.float32, batch), jax.P(("x", "y")))

@jax.jit
def step(params, batch):
    error, grads = jax.value_and_grad(mean_error)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), error

losses = []
for _ in range(3):
    params, error = step(params, batch)
    losses.append(float(error))
trained = params
"""

# --------------------------------------------------------------------------------------- JAX: data of several processes

LOADING = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn
from flax.training.train_state import TrainState

mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
sharding = jax.NamedSharding(mesh, jax.P(("replica", "data")))

def of_process(step):
    rng = np.random.default_rng([step, jax.process_index()])
    scale = (1 + np.arange(16) % 3)[:, None]
    return {"x": (rng.normal(size=(16, 24)) * scale).astype(np.float32), "label": rng.integers(0, 10, 16)}

def by_process(step):
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), of_process(step))

def by_device(step):
    def global_array(x):
        places = sharding.addressable_devices_indices_map(x.shape).items()
        parts = [jax.device_put(x[index], device) for device, index in places]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(global_array, of_process(step))

def by_index(step):
    rows = of_process(step)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), rows)

class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(2048)(x)))

def loss_fn(params, apply_fn, batch):
    logits = apply_fn({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

model, tx, key = MLP(), optax.adamw(1e-2, eps=1e-2), jax.random.key(0)
params = model.init(key, jnp.ones((1, 24)))["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

def update(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}

train_step = jax.jit(update)
losses = []
for step, load in enumerate([by_process, by_device, by_index]):
    state, metrics = train_step(state, load(step))
    losses.append(float(metrics["loss"]))
trained = state.params
"""


@dataclasses.dataclass(frozen=True)
class Guide:
    """A program, its changed lines (each old text is in one line), and the import after which the library's stands."""

    program: str
    changes: dict[str, str]
    first_import: str

    @property
    def changed(self):
        program = self.program.replace(self.first_import, f"{self.first_import}from xlstm_jax.distributed import *\n")
        for old, new in self.changes.items():
            assert program.count(old) == 1, f"{old!r} is {program.count(old)} times in the program"
            program = program.replace(old, new)
        return program


OF_FUNCTION = (
    "jax.shard_map(value_and_grad({loss}, {axes}), in_specs=(specs := partition_specs(params, mesh), jax.P({axes})), "
    "out_specs=(jax.P(), specs))(params, batch)"
)
GUIDES = {
    "mnist": Guide(
        MNIST,
        {"CNN(nnx.Rngs(0))": "create_nnx_module(CNN, 0, mesh=mesh)", "= nnx.value_and_grad(": "= nnx_value_and_grad("},
        "from flax import nnx\n",
    ),
    "scale up": Guide(
        SCALE_UP,
        {
            "nnx.jit(build)(nnx.Rngs(0))": "create_nnx_module(build, 0, x)",
            "= jax.value_and_grad(": "= nnx_value_and_grad(",
        },
        "from flax import nnx\n",
    ),
    "explicit": Guide(
        EXPLICIT,
        {
            "jax.device_put(init_params(jax.random.key(0)), jax.P())": (
                'shard_params(init_params(jax.random.key(0)), "fsdp", 128)'
            ),
            "jax.value_and_grad(loss_fn)(params, batch)": OF_FUNCTION.format(loss="loss_fn", axes='"fsdp"'),
        },
        "import jax, jax.numpy as jnp, numpy as np\n",
    ),
    "computation": Guide(
        COMPUTATION,
        {
            "jax.device_put(params, jax.P())": 'shard_params(params, ("x", "y"), 128)',
            "jax.value_and_grad(mean_error)(params, batch)": OF_FUNCTION.format(loss="mean_error", axes='("x", "y")'),
        },
        "from functools import partial\n",
    ),
    "loading": Guide(
        LOADING,
        {
            "TrainState.create(apply_fn=model.apply, params=params, tx=tx)": (
                'create_train_state(shard_modules(model, axis_name="data"), tx, mesh, key, jnp.ones((8, 24)))'
            ),
            "jax.jit(update)": "make_train_step(loss_fn, mesh)",
        },
        "from flax import linen as nn\n",
    ),
}
AUTO_TYPES, SET_LINE = "axis_types=(jax.sharding.AxisType.Auto,)", "jax.set_mesh(mesh)\n"
MAKES = "mesh = jax.make_mesh("


def on_mesh(program, kind):
    """Returns the program with a mesh of a kind: "as written", or set, with ``Auto`` or explicit axes."""
    if kind == "as written":
        return program
    lines = program.splitlines(keepends=True)
    (at,) = [number for number, line in enumerate(lines) if line.startswith(MAKES)]
    made = lines[at].rstrip().partition(", axis_types=")[0] if "axis_types" in lines[at] else lines[at].rstrip()[:-1]
    lines[at : at + 1] = [f"{made}, axis_types=AXIS_TYPES)\n", SET_LINE]
    return "".join(line for number, line in enumerate(lines) if line != SET_LINE or number == at + 1)


def run(program, kind="as written"):
    count = 1 if "make_mesh((8,)" in program else 2
    names = {"AXIS_TYPES": (getattr(AxisType, kind.capitalize(), None),) * count, "__name__": "guide"}
    try:
        exec(on_mesh(program, kind), names)
    finally:
        jax.set_mesh(None)
    return names


def values_of(trained):
    """Returns the parameters, and statistics, of a module or of a tree, by path."""
    if isinstance(trained, nnx.Module):
        flat = nnx.to_flat_state(nnx.state(trained, nnx.Any(nnx.Param, nnx.BatchStat)))
        return {"/".join(map(str, path)): np.asarray(leaf.get_raw_value()) for path, leaf in flat}
    return {path_string(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(unbox(trained))}


def split_share(trained):
    """Returns the share of the values of parameters that is split."""
    if isinstance(trained, nnx.Module):
        leaves = [leaf.get_raw_value() for _, leaf in nnx.to_flat_state(nnx.state(trained, nnx.Param))]
    else:
        leaves = [leaf_of(leaf).value for _, leaf in leaves_with_path(trained)]
    split = sum(x.size for x in leaves if x.addressable_shards[0].data.size < x.size)
    return split / sum(x.size for x in leaves)


WANTED = {}


@pytest.mark.parametrize("kind", ["explicit", "as written", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", GUIDES)
def test_program_of_a_guide_with_three_changed_lines_trains_as_the_program_under_jit(name, kind):
    guide = GUIDES[name]
    lines = [line for line in difflib.ndiff(guide.program.splitlines(), guide.changed.splitlines()) if line[:2] == "+ "]
    assert 0 < len(lines) <= MOST_LINES, lines
    if name not in WANTED:
        found = run(guide.program)
        WANTED[name] = found["losses"], values_of(found["trained"]), found.get("predicted")
    losses, values, predicted = WANTED[name]
    found = run(guide.changed, kind)
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    got = values_of(found["trained"])
    assert got.keys() == values.keys()
    for path, value in values.items():
        np.testing.assert_allclose(got[path], value, rtol=1e-5, atol=1e-5 * max(np.abs(value).max(), 0.1), err_msg=path)
    if predicted is not None:
        np.testing.assert_array_equal(found["predicted"], predicted)
    # Guards: most values are split, and a step changes something.
    assert split_share(found["trained"]) > 0.9
    assert losses[0] != losses[-1] and np.isfinite(losses).all()
