"""Errors of meshes and of the layout of batches."""

import collections
import dataclasses
import itertools
from functools import partial

from jax.sharding import NamedSharding

from tests.errors.shared import AXES, KEY, MESH, DeviceMeshManager, P, create, jax, jnp, make_train_step, nn, np, optax
from tests.errors.table import Section
from xlstm_jax.distributed import (
    abstract_batch,
    create_train_state,
    init_sharded,
    shard_batch,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.device_mesh import DataParallel, from_zigzag, to_zigzag
from xlstm_jax.distributed.device_mesh.batch_layout import auto_mesh, mesh_axes
from xlstm_jax.distributed.device_mesh.topology import fsdp_layout, mesh_by_topology
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step

meshes, batches, names, calls, contexts = map(
    Section, ["Meshes and devices", "Batches", "Axis names", "Calling a step", "Long contexts and experts"]
)
ROWS8 = {"x": np.ones((8, 3), np.float32)}
CUBE = create({"dp": 2, "fsdp": 2, "cp": 2})
TOKENS = {
    "tokens": np.arange(64.0).reshape(4, 16),
    "label": np.arange(4.0),
    "scale": np.float32(2),
}
CHIP = collections.namedtuple("CHIP", "id process_index coords slice_index platform device_kind core_on_chip")


def chips(places, slices=()):
    """Returns devices with a place in a torus, as TPUs have."""
    return [
        CHIP(i, s, p, s, "tpu", "TPU v5e", 0)
        for i, (p, s) in enumerate(itertools.zip_longest(places, slices, fillvalue=0))
    ]


@dataclasses.dataclass
class Unregistered:
    """A dataclass that is not registered with JAX."""

    x: np.ndarray


MESH_TAKERS = {
    "auto-mesh": auto_mesh,
    "mesh-axes": lambda mesh: mesh_axes(mesh, "fsdp", "batch_axes"),
    "shard-batch": lambda mesh: shard_batch(ROWS8, mesh, "fsdp"),
    "abstract-batch": lambda mesh: abstract_batch(ROWS8, mesh, "fsdp"),
    "get-mesh-info": DeviceMeshManager.get_mesh_info,
    "init-sharded": lambda mesh: init_sharded(nn.Dense(2), mesh, KEY, ROWS8["x"], batch_axes="fsdp"),
    "create-train-state": lambda mesh: create_train_state(
        nn.Dense(2), optax.sgd(0.1), mesh, KEY, ROWS8["x"], batch_axes="fsdp"
    ),
    "make-train-step": lambda mesh: make_train_step(lambda *_: 0.0, mesh, "fsdp"),
    "make-log-step": lambda mesh: make_log_step(WeightedMean(), mesh, "fsdp"),
}
NO_MESHES = {
    "none": (None, "mesh is None; a mesh is", "create_device_mesh({'fsdp': -1})"),
    "sizes": ((2, 4), "mesh=(2, 4) is a tuple", "create_device_mesh({'dp': 2, 'fsdp': 4})"),
    "dict": ({"fsdp": 8}, "mesh={'fsdp': 8} is a dict", "create_device_mesh({'fsdp': 8})"),
    "number": (8, "mesh=8 is a int", "create_device_mesh({'fsdp': 8})"),
    "devices": (jax.devices(), "is a list", "create_device_mesh({'fsdp': 8}, devices)"),
    "class": (DeviceMeshManager, "is a DeviceMeshManager", "create_device_mesh({'fsdp': -1})"),
    "sharding": (NamedSharding(MESH, P()), "is a NamedSharding", "Pass the mesh of this sharding, as sharding.m"),
}
SPECS = {"tokens": P(("dp", "fsdp"), "cp"), "label": P(("dp", "fsdp")), "scale": P()}


def sharded(**options):
    """Checks that both functions that lay out a batch raise the same text; raises the second error."""
    batch = TOKENS | options.pop("change", {})
    try:
        shard_batch(batch, CUBE, **options)
    except (TypeError, ValueError) as first:
        try:
            abstract_batch(batch, CUBE, **options)
        except (TypeError, ValueError) as second:
            assert str(first) == str(second), f"shard_batch says: {first}; abstract_batch: {second}"
            raise


def spec(name, words, *says, error=ValueError, section=calls, **options):
    """Returns a row for an invalid ``batch_spec``."""
    return section(name, lambda: sharded(**options), error, words, *says)


ROWS = [
    # ----- shapes of meshes
    meshes(
        "mesh-too-many",
        lambda: create({"dp": 5, "fsdp": 2}),
        ValueError,
        "mesh_shape=… takes … devices",
        "takes 10 devices, but there are 8. Nearest shapes that fit: {'dp': 4, 'fsdp': 2}, ",
        "; or try it on simu",
    ),
    meshes(
        "mesh-wild-does-not-divide",
        lambda: create({"dp": 3, "fsdp": -1}),
        ValueError,
        "mesh_shape=… takes … devices",
        "takes 3 devices or a multiple, but there are 8",
        "{'dp': 4, 'fsdp': 2}, {'dp': 2",
    ),
    meshes(
        "mesh-data-too-many",
        lambda: create({"data": 12}),
        ValueError,
        "mesh_shape=… takes … devices",
        "takes 12 devices, but there are 8",
    ),
    meshes(
        "mesh-hybrid-too-many",
        lambda: DeviceMeshManager.create_hybrid_mesh(3, 4),
        ValueError,
        "mesh_shape=… takes … devices",
        "takes 12 devices, but there are 8",
    ),
    names("mesh-axis-twice", lambda: create([("dp", 2), ("dp", 4)]), ValueError, "axis_name=… names an axis twice"),
    names("mesh-empty", lambda: create({}), ValueError, "axis_name=… names no mesh axis"),
    meshes(
        "mesh-two-wild",
        lambda: create({"dp": -1, "fsdp": -1}),
        ValueError,
        "mesh_shape=…: a size is",
        "at most one of them -1",
    ),
    meshes("mesh-size-zero", lambda: create({"fsdp": 0}), ValueError, "mesh_shape=…: a size is", "{'fsdp': 0}"),
    meshes("mesh-size-bool", lambda: create({"fsdp": True}), ValueError, "mesh_shape=…: a size is"),
    meshes("mesh-number", lambda: create(8), ValueError, "mesh_shape=… has no axis names", "write {'fsdp': 8}, say"),
    meshes(
        "mesh-tuple",
        lambda: create((2, 4)),
        ValueError,
        "mesh_shape=… has no axis names",
        "write {'dp': 2, 'fsdp': 4}, say",
    ),
    meshes("mesh-none", lambda: create(None), ValueError, "mesh_shape=… has no axis names", "mesh_shape=None has"),
    meshes("mesh-string", lambda: create("fsdp"), ValueError, "mesh_shape=… has no axis names", "write {'dp'"),
    meshes(
        "mesh-abstract-tuple",
        lambda: DeviceMeshManager.create_abstract_mesh((4, 64)),
        ValueError,
        "mesh_shape=… has no axis names",
        "mesh_shape=(4, 64) has",
        "write {'dp': 4, 'fsdp': 64}, say",
    ),
    meshes(
        "mesh-abstract-wild",
        lambda: DeviceMeshManager.create_abstract_mesh({"fsdp": -1}),
        ValueError,
        "mesh_shape=…: name axes",
        "{'fsdp': -1}",
    ),
    # ----- devices
    meshes(
        "devices-none",
        lambda: create({"fsdp": 2}, []),
        ValueError,
        "devices: …, of which … differ",
        "devices: 0, of which 0 differ. Name at least one, each once, as jax.devices()[:4]; or leave",
    ),
    meshes(
        "devices-twice",
        lambda: create({"fsdp": 2}, jax.devices()[:1] * 2),
        ValueError,
        "devices: …, of which … differ",
        "devices: 2, of which 1 differ",
    ),
    meshes(
        "devices-numbers",
        lambda: create({"fsdp": 2}, [0, 1]),
        TypeError,
        "devices holds …",
        "devices holds 0, a int; pass devices, as jax.devices()[:4]",
    ),
    meshes("devices-number", lambda: create({"fsdp": 2}, 2), TypeError, "devices holds …", "devices holds 2, a int"),
    meshes(
        "devices-for-data",
        lambda: DeviceMeshManager.create_data_parallel_mesh("4"),
        ValueError,
        "num_devices=… for the axis",
        "num_devices='4' for the axis 'data': there are 8 devices",
    ),
    *[
        meshes(
            f"devices-for-{axis}-{count}",
            lambda count=count, make=make: make(count),
            ValueError,
            "num_devices=… for the axis",
            f"={count} for the axis '{axis}': there are 8 devices, 1 to 8 fit",
        )
        for count in (-1, 0, 9)
        for axis, make in [
            ("model", DeviceMeshManager.create_model_parallel_mesh),
            ("data", DeviceMeshManager.create_data_parallel_mesh),
        ]
    ],
    meshes(
        "devices-uneven-slices",
        lambda: mesh_by_topology((3,), ("fsdp",), chips([(0, 0), (0, 1), (0, 2)], (0, 0, 1))),
        ValueError,
        "… have different numbers of devices",
        "{0: 2, 1: 1}",
    ),
    meshes(
        "devices-with-a-gap",
        lambda: fsdp_layout(chips([(0, 0, 0), (0, 1, 0), (1, 0, 0)])),
        ValueError,
        "devices: …, or lay one axis",
        "create_device_mesh({'fsdp': -1}, devices)",
    ),
    meshes(
        "simulate-too-late",
        lambda: simulate_cpu_devices(4),
        RuntimeError,
        "simulate_cpu_devices(…) came too late",
        "simulate_cpu_devices(4) came too late: JAX already runs on 8 cpu device",
    ),
    meshes(
        "simulate-none",
        lambda: simulate_cpu_devices(0),
        ValueError,
        "simulate_cpu_devices(…): the number",
        "simulate_cpu_devices(0)",
    ),
    # ----- what is no mesh
    *[
        meshes(f"no-mesh-{kind}-{function}", lambda take=take, bad=bad: take(bad), TypeError, "mesh… is …", *says)
        for function, take in MESH_TAKERS.items()
        for kind, (bad, *says) in NO_MESHES.items()
    ],
    *[
        meshes(
            f"{name}-on-an-abstract-mesh",
            lambda made=made: made(MESH.abstract_mesh, KEY, ROWS8["x"]),
            TypeError,
            "mesh… is …",
            "is an AbstractMesh, which has no devices; ",
        )
        for name, made in [
            ("variables", partial(init_sharded, nn.Dense(2))),
            ("state", partial(create_train_state, nn.Dense(2), optax.sgd(0.1))),
        ]
    ],
    meshes(
        "mesh-without-devices",
        lambda: shard_batch(ROWS8, DeviceMeshManager.create_abstract_mesh({"fsdp": 8}), "fsdp"),
        TypeError,
        "mesh… is …",
        "is an AbstractMesh, which has no devices; ",
        "create_device_mesh({'fsdp': 8})",
    ),
    meshes(
        "batch-axis-misspelt",
        lambda: shard_batch(ROWS8, MESH, "fdsp"),
        ValueError,
        "…=…: the mesh has no axis",
        "'fdsp'",
        "{'dp': 2, 'fsdp': 4}",
    ),
    # ----- batches
    batches(
        "batch-rows-abstract",
        lambda: abstract_batch({"x": np.ones(10)}, DeviceMeshManager.create_abstract_mesh({"fsdp": 8}), "fsdp"),
        ValueError,
        "batch['…'] of shape … has … rows, which",
        "batch['x'] of shape (10,)",
        "has 10 rows, which the 8 devices",
        "Take 16 rows",
    ),
    batches(
        "batch-rows",
        lambda: shard_batch({"x": np.ones(10)}, MESH, AXES),
        ValueError,
        "… does not divide the … rows",
        "8 does not divide the 10 rows",
        "Hand in 8 or 16 rows",
    ),
    batches(
        "batch-pad-too-few",
        lambda: shard_batch({"x": np.ones(10)}, MESH, AXES, pad=8),
        ValueError,
        "pad=… rows for",
        "pad=8 rows for 10 rows",
    ),
    batches(
        "batch-pad-no-multiple",
        lambda: shard_batch({"x": np.ones(10)}, MESH, AXES, pad=12),
        ValueError,
        "pad=… rows for",
        "a multiple of 8",
    ),
    batches(
        "batch-no-rows",
        lambda: shard_batch({"x": np.float32(1)}, MESH, AXES),
        ValueError,
        "the batch has no leaf with rows",
    ),
    batches(
        "batch-uneven-rows",
        lambda: shard_batch({"x": np.ones(8), "y": np.ones(16)}, MESH, AXES),
        ValueError,
        "batch['…'] of shape … has … rows, but",
        "batch['y'] of shape (16,) has 16 rows",
        "batch['x'] of shape (8,) has 8",
    ),
    batches(
        "batch-list-of-numbers",
        lambda: shard_batch({"x": [1.0] * 8}, MESH, AXES),
        TypeError,
        "… is a list of … Python numbers",
        "batch['x'] is a list of 8 Python numbers",
    ),
    batches(
        "batch-dataclass",
        lambda: shard_batch({"x": Unregistered(np.ones(8))}, MESH, AXES),
        TypeError,
        "… is a …, a dataclass",
        "batch['x'] is a Unregistered",
        "register_dataclass",
    ),
    batches(
        "batch-traced",
        lambda: jax.eval_shape(lambda x: shard_batch({"x": x}, MESH, AXES), np.ones(8)),
        TypeError,
        "… is traced and has no",
        "batch['x']",
    ),
    batches(
        "batch-type",
        lambda: shard_batch({"x": jax.ShapeDtypeStruct((8,), jnp.float32)}, MESH, AXES),
        TypeError,
        "… is a type without",
        "batch['x']",
        "abstract_batch",
    ),
    calls(
        "batch-string",
        lambda: shard_batch({"x": np.ones(8), "name": "train"}, MESH, AXES),
        TypeError,
        "… is …",
        "batch['name'] is 'train'",
    ),
    calls(
        "batch-string-abstract",
        lambda: abstract_batch({"x": np.ones(8), "name": "train"}, MESH, AXES),
        TypeError,
        "… is …",
        "batch['name'] is 'train'",
    ),
    batches(
        "batch-keys",
        lambda: shard_batch({"key": jax.random.split(KEY, 8)}, MESH, AXES),
        TypeError,
        "… has the dtype",
        "batch['key'] has the dtype key<fry>",
        "jax.random.key_data",
    ),
    batches(
        "batch-large-integer",
        lambda: shard_batch({"x": np.ones(8), "n": 2**40}, MESH, AXES),
        ValueError,
        "… is …, which … does not hold",
        f"batch['n'] is {2**40}, which int32",
    ),
    meshes(
        "data-parallel-choice",
        lambda: DataParallel.all_reduce_gradients(1.0, "median"),
        ValueError,
        "Unsupported …",
        "'median' is none of 'mean', 'su",
    ),
    meshes(
        "data-parallel-state",
        lambda: DataParallel.shard_model_state({}, MESH, "split"),
        ValueError,
        "Unsupported …",
        "'split' is none of 'repl",
    ),
    meshes(
        "data-parallel-sharding",
        lambda: DataParallel.shard_batch(ROWS8, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        TypeError,
        "sharding is a …, and names no axes",
        "SingleDeviceSharding",
    ),
    meshes(
        "data-parallel-whole",
        lambda: DataParallel.shard_batch(ROWS8, NamedSharding(MESH, P())),
        ValueError,
        "sharding splits by …",
    ),
    # ----- specs of a batch
    spec("spec-none", "batch_axes=… and batch_spec=…", "batch_axes=None and batch_spec=None: pass one"),
    spec(
        "spec-both",
        "batch_axes=… and batch_spec=…",
        "batch_axes='dp' and batch_spec=P",
        batch_axes="dp",
        batch_spec=P("dp"),
    ),
    spec("spec-as-names", "batch_axes=… and batch_spec=…", "batch_spec=None: pass one", batch_axes=P("dp", "cp")),
    spec(
        "spec-of-strings",
        "… is …, and a PartitionSpec",
        "batch_spec['0'] is 'fsdp'",
        error=TypeError,
        batch_spec=("fsdp", "cp"),
    ),
    spec(
        "spec-unconstrained",
        "… is …, and a PartitionSpec",
        "UNCONSTRAINED",
        error=TypeError,
        batch_spec=P("dp", P.UNCONSTRAINED),
    ),
    spec(
        "spec-misspelt",
        "…=…: the mesh has no axis",
        "batch_spec=P",
        "'sp'; its axes are",
        "'cp': 2",
        section=meshes,
        batch_spec=P("dp", "sp"),
    ),
    spec(
        "spec-axis-twice",
        "…=… names the axis",
        "batch_spec=P",
        "names the axis 'cp' twice",
        batch_spec=P(("dp", "cp"), "cp"),
    ),
    spec("spec-splits-nothing", "batch_spec=… splits nothing", batch_spec=P(None, None)),
    spec(
        "spec-rows-differ",
        "batch_spec splits dim 0",
        "over ('dp', 'fsdp') at 'label' and over ('cp',) at 'tokens'",
        batch_spec=SPECS | {"tokens": P("cp")},
    ),
    spec(
        "spec-of-other-leaves",
        "batch_spec has specs at",
        "at 'label', 'tokens', and the batch has leaves at 'label', 'scale', 'tokens'",
        batch_spec={name: SPECS[name] for name in ("tokens", "label")},
    ),
    spec(
        "spec-of-more-dims",
        "… of shape … has … dims",
        "batch['label'] of shape (4,) has 1 dims, and its spec P",
        "is of 2",
        batch_spec=P(("dp", "fsdp"), "cp"),
    ),
    spec(
        "spec-of-a-leaf-splits-nothing",
        "… of shape … has the spec",
        "batch['label'] of shape (4,) has the spec P(), which splits nothing",
        batch_spec=SPECS | {"label": P()},
    ),
    spec(
        "spec-does-not-divide",
        "… of shape … has the spec",
        "batch['tokens'] of shape (4, 13)",
        "the 2 devices over ('cp',) do not divide dim 1 of size 13. Pad it to 14",
        batch_spec=SPECS,
        change={"tokens": np.ones((4, 13))},
    ),
    contexts(
        "spec-zigzag-without-sequence",
        lambda: make_train_step(lambda *_: 0.0, CUBE, batch_spec=P(("dp", "fsdp")), layout="zigzag"),
        ValueError,
        "layout='zigzag', and … splits",
        "no sequence",
    ),
    contexts(
        "spec-layout-misspelt",
        lambda: make_train_step(lambda *_: 0.0, CUBE, batch_spec=P(("dp", "fsdp"), "cp"), layout="zigzig"),
        ValueError,
        "layout=…: pass 'contiguous'",
        "'zigzig'",
    ),
    # ----- zigzag
    calls(
        "zigzag-other-lengths",
        lambda: to_zigzag({"a": TOKENS["tokens"], "image": np.ones((4, 8, 8))}, 2),
        ValueError,
        "batch['…'] of shape … has … entries along",
        "batch['image'] of shape (4, 8, 8) has 8 entries along dim 1",
        "16 tokens",
    ),
    calls(
        "zigzag-no-tokens",
        lambda: to_zigzag({"label": TOKENS["label"]}, 2),
        ValueError,
        "no leaf of the batch has a dim",
        "no leaf of the batch has a dim 1, of tokens",
    ),
    contexts(
        "zigzag-again",
        lambda: to_zigzag(to_zigzag({"tokens": TOKENS["tokens"]}, 2), 2),
        ValueError,
        "to_zigzag: … of shape … is laid out",
        "batch['tokens'] of shape (4, 16)",
        "2 devices already",
    ),
    contexts(
        "zigzag-back-from-others",
        lambda: from_zigzag(to_zigzag({"tokens": TOKENS["tokens"]}, 2), 4),
        ValueError,
        "from_zigzag(batch, …): … of shape",
        "from_zigzag(batch, 4): batch['tokens'] of shape (4, 16)",
        "for 2 devices",
    ),
    contexts(
        "zigzag-does-not-divide",
        lambda: to_zigzag({"tokens": np.ones((4, 18))}, 2),
        ValueError,
        "…: … tokens do not divide into the … chunks",
        "18 tokens do not divide into the 4 chunks",
        "20",
    ),
]
