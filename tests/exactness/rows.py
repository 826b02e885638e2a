"""The rows of the matrix: the features of the library, each as a change of the plain case.

A row is its name, the change, and ``shows``: what of a training says that the feature is on. Beside these:

  quick      the column in which ``make test`` tries it; all others are in ``make test-rest``
  only       the meshes on which it stands, where it does not stand on all; ``because`` is why
  tolerance  of a leaf's largest entry, where rounding of float32 is not all that differs; ``because`` is why

Two rows that decide the same thing differently are no pair; what else is none stands in ``APART`` with its reason, and
what the library refuses in ``REFUSED`` with its words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from flax import linen as nn

from tests.exactness.case import ADAMW, DECAY, Case, Trained, decisions
from tests.exactness.model import TWIN_FIELDS
from tests.support import FLOAT32_ROUNDING
from xlstm_jax.distributed import Offload, PackSmall, Replicas, muon, skip_nonfinite, with_ema
from xlstm_jax.distributed.data_parallel import AllReduceGradients
from xlstm_jax.distributed.data_parallel.extensions.packing import PACKED
from xlstm_jax.distributed.optimizers import matrix_dimensions

MESHES = ("1x8", "2x4", "8x1")  # devices along "dp" and along "fsdp"
VMA = {"vma": True, "no_vma": False}
COLUMNS = [f"{mesh}-{mode}" for mesh in MESHES for mode in VMA]
# The same, on meshes that ``jax.set_mesh`` has set; of "mixed" axes "fsdp" is explicit.
KINDS = ("explicit", "mixed", "auto")
SET_COLUMNS = [f"{column}-{kind}" for kind in KINDS for column in COLUMNS]
GATHERED = ("1x8", "2x4")
NOTHING_GATHERED = "over one device nothing is gathered"


@dataclass(frozen=True)
class Row:
    name: str
    changes: Mapping[str, Any]
    shows: Callable[[Trained], bool]
    quick: str
    only: tuple[str, ...] = MESHES
    tolerance: float = FLOAT32_ROUNDING
    because: str = ""

    @property
    def case(self) -> Case:
        return Case().but(**self.changes)

    @property
    def columns(self) -> list[str]:
        return [column for column in COLUMNS if column.partition("-")[0] in self.only]

    @property
    def set_columns(self) -> list[str]:
        """The columns of set meshes, the one that is tried first before the others: it differs from row to row."""
        found = [column for column in SET_COLUMNS if column.partition("-")[0] in self.only]
        # Steps of 7 visit all 18 columns before one comes again, as 7 and 18 (12, 6) have no factor in common.
        first = 7 * [row.name for row in ROWS].index(self.name) % len(found)
        return found[first:] + found[:first]


def some(holds: Callable[[Any], bool]) -> Callable[[Trained], bool]:
    """Whether some parameter is stored so."""
    return lambda run: any(map(holds, run.leaves))


def calls(*primitives: str) -> Callable[[Trained], bool]:
    return lambda run: any(map(run.calls, primitives))


def sends(collective: str, dtype: str) -> Callable[[Trained], bool]:
    return lambda run: dtype in {str(aval.dtype) for aval in run.sent(collective)}


def boxed_over(axis: str) -> Callable[[Trained], bool]:
    return some(lambda leaf: axis in leaf.model_axes)


def kinds_of_memory(run: Trained) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(run.state.opt_state)}


def type_names(tree: Any) -> list[str]:
    """The names of all states within a state of an optimizer."""
    found = []

    def look(node: Any) -> bool:
        found.append(type(node).__name__)
        return False

    jax.tree.leaves(tree, is_leaf=look)
    return found


def is_trained(path: str) -> bool:
    return not path.startswith(("first", "embed", "layers/up", "layers/feed", "layers/norm"))


FP8 = partial(nn.Fp8DirectDotGeneralOp, amax_history_length=4)
TOKENS = {"reads": "tokens"}
SPLIT_STATE = Replicas("dp", shard_optimizer_state=True)
TP, EP, CP = ({"axes": {axis: 2}} for axis in ("tp", "ep", "cp"))
HEADS = {  # of attention without a bias: nothing else tells
    "*/mixer/out/kernel": optax.contrib.MuonDimensionNumbers((0, 1), 2),
    "*/mixer/*/kernel": optax.contrib.MuonDimensionNumbers(0, (1, 2)),
}


def matrices(params: Any) -> Any:
    paths = [jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return matrix_dimensions(HEADS if any("mixerout" in path for path in paths) else None)(params)


OPTAX_MUON = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=matrices)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)

ROWS = [
    Row("plain", {}, lambda run: bool(run.sent("reduce_scatter") and run.sent("all_gather")), "2x4-vma", GATHERED),
    # How leaves are stored, and how they travel.
    Row(
        "padding",
        {"wrapping": {"uneven": "pad"}, "parts": {"width": 15, "hidden": 21}},
        some(lambda leaf: not leaf.stores_value),
        "1x8-no_vma",
        GATHERED,
        because=NOTHING_GATHERED,
    ),
    Row(
        "copies",
        {"wrapping": {"replicas": Replicas("dp")}},
        some(lambda leaf: bool(leaf.communication.copied_axes)),
        "2x4-no_vma",
        ("2x4",),
        because="copies need devices along both axes",
    ),
    Row(
        "copies with split moments",
        {"wrapping": {"replicas": SPLIT_STATE}},
        lambda run: any("dp" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(run.state.opt_state)),
        "2x4-vma",
        ("2x4",),
        because="copies need devices along both axes",
    ),
    Row(
        "packed",
        {"wrapping": {"packing": PackSmall()}},
        some(lambda leaf: any(mark.startswith(PACKED) for mark in leaf.marks)),
        "2x4-no_vma",
        GATHERED,
        because=NOTHING_GATHERED,
    ),
    Row(
        "gradients by all-reduce",
        {"wrapping": {"options": (AllReduceGradients(),)}},
        lambda run: not run.sent("reduce_scatter"),
        "2x4-vma",
        GATHERED,
        because=NOTHING_GATHERED,
    ),
    Row(
        "several axes",
        {"wrapping": {"axis_name": ("dp", "fsdp")}},
        some(lambda leaf: set(leaf.axes) >= {"dp", "fsdp"}),
        "2x4-vma",
    ),
    Row(
        "gathered again",
        {"wrapping": {"reshard_after_forward": True}},
        calls("checkpoint", "remat", "remat2"),
        "1x8-vma",
        GATHERED,
        because=NOTHING_GATHERED,
    ),
    Row(
        "8-bit blocks",
        {"wrapping": {"gather_dtype": "int8"}},
        sends("all_gather", "uint8"),
        "2x4-no_vma",
        GATHERED,
        0.05,
        "a weight is off by half of 1/127 of its block's largest, and two or three products of such weights follow",
    ),
    Row(
        "bfloat16 gathers",
        {"wrapping": {"gather_dtype": "bfloat16"}},
        sends("all_gather", "bfloat16"),
        "1x8-vma",
        GATHERED,
        0.03,
        "a weight is off by 2^-9, and so is each device's gradient; three products of such weights follow",
    ),
    Row(
        "bfloat16 scatters",
        {"wrapping": {"grad_scatter_dtype": "bfloat16"}},
        sends("reduce_scatter", "bfloat16"),
        "2x4-no_vma",
        GATHERED,
        0.01,
        "each device's gradient is off by 2^-9 of its largest, and the sum is rounded in bfloat16",
    ),
    # Which leaves are trained, and how.
    Row(
        "frozen",
        {"making": {"trainable": is_trained, "frozen_dtype": "bfloat16"}},
        some(lambda leaf: not leaf.trainable),
        "8x1-vma",
    ),
    Row("clipping", {"tx": CLIPPED}, lambda run: run.moments[0].norm > 0.2, "8x1-no_vma"),
    Row(
        "muon",
        {"tx": OPTAX_MUON, "on_mesh_tx": muon(1e-2, muon_weight_dimension_numbers=matrices)},
        lambda run: "MuonState" in str(type_names(run.state.opt_state)),
        "2x4-vma",
        tolerance=1e-4,
        because="Newton and Schulz's polynomial amplifies small singular values and their rounding, 3.4 times a turn",
    ),
    Row(
        "adafactor",
        {"tx": optax.adafactor(1e-2, min_dim_size_to_factor=4)},
        lambda run: "FactoredState" in str(type_names(run.state.opt_state)),
        "1x8-no_vma",
    ),
    Row("offload", {"making": {"offload": Offload()}}, lambda run: len(kinds_of_memory(run)) == 2, "2x4-no_vma"),
    Row(
        "average",
        {"around": {"average": partial(with_ema, decay=DECAY)}},
        lambda run: "WithEmaState" in str(type_names(run.state.opt_state)),
        "8x1-vma",
    ),
    Row(
        "skip_nonfinite",
        {"around": {"skipping": skip_nonfinite}, "spoiled": True},
        lambda run: "SkipNonfiniteState" in str(type_names(run.state.opt_state)),
        "1x8-vma",
    ),
    # The reference shows the weights: without weights the loss differs
    # (test_guard_compare_fails_for_weighted_against_unweighted_training).
    Row("weighted", {"weighted": True}, lambda run: True, "2x4-no_vma"),
    Row("minibatches", {"stepping": {"num_minibatches": 2}}, calls("scan"), "8x1-no_vma"),
    Row(
        "minibatches, reduced once",
        {"stepping": {"num_minibatches": 2, "accumulation": "reduce_once"}},
        calls("scan"),
        "1x8-vma",
    ),
    Row("checkpoint", {"saved": True}, lambda run: run.meshes[0] != run.meshes[-1], "2x4-vma"),
    Row(
        "copies, reduced once",
        {
            "wrapping": {"replicas": Replicas("dp")},
            "stepping": {"num_minibatches": 2, "accumulation": "reduce_replicas_once"},
        },
        calls("scan"),
        "2x4-no_vma",
        ("2x4",),
        because="copies need devices along both axes",
    ),
    # How the model is made.
    Row("remat", {"parts": {"remat": True}}, calls("checkpoint", "remat", "remat2"), "1x8-no_vma"),
    Row("scan", {"parts": {"stack": "scan"}}, calls("scan"), "8x1-vma"),
    Row(
        "prefetch",
        {"parts": {"stack": "prefetched"}},
        calls("optimization_barrier"),
        "2x4-no_vma",
        GATHERED,
        because=NOTHING_GATHERED,
    ),
    Row("nnx", {"framework": "nnx"}, lambda run: "nnx" in str(run.state.apply_fn).lower(), "2x4-vma"),
    Row("from outside", {"outside": True}, some(lambda leaf: bool(leaf.axes)), "1x8-no_vma"),
    Row("logical names", {"parts": {"named": True}}, some(lambda leaf: "fsdp" in leaf.axes), "2x4-no_vma"),
    Row(
        "statistics",
        {"parts": {"norm": "batch"}},
        lambda run: "batch_stats" in run.state.collections,
        "2x4-vma",
    ),
    Row("recurrence", {"parts": {"mixer": "recurrence"}}, calls("scan"), "2x4-vma"),
    Row(
        "attention of Flax",
        {"parts": {"mixer": "attention"}},
        some(lambda leaf: leaf.ndim == 3 and bool(leaf.axes)),
        "8x1-no_vma",
    ),
    Row(
        "fp8",
        {"parts": {"product": FP8}, "wrapping": {"gather_dtype": "float8_e4m3fn", "min_weight_size": 64}},
        sends("all_gather", "uint8"),  # and biases stay whole, which would be rounded
        "1x8-vma",
        GATHERED,
        because=NOTHING_GATHERED,
    ),
    Row("lookup by rows", {"parts": TOKENS}, calls("all_to_all"), "2x4-vma", GATHERED, because=NOTHING_GATHERED),
    Row(
        "head by pieces",
        {"parts": {"head": "pieces"}},
        calls("scan", "while"),
        "1x8-vma",
        GATHERED,
        because=NOTHING_GATHERED,
    ),
    # What the model splits itself.
    Row("split layers", {"parts": {"feed": "split"}, **TP}, boxed_over("tp"), "2x4-no_vma"),
    Row("split sequence", {"parts": {"feed": "split sequence"}, **TP}, boxed_over("tp"), "8x1-vma"),
    Row("split heads", {"parts": {"mixer": "split heads"}, **TP}, boxed_over("tp"), "1x8-vma"),
    Row(
        "split vocabulary",
        {"parts": {"reads": "split tokens", "head": "split vocabulary"}, **TP},
        boxed_over("tp"),
        "2x4-vma",
    ),
    Row("experts", {"parts": {"feed": "experts"}, **EP}, boxed_over("ep"), "2x4-no_vma"),
    Row("context", {"parts": {"mixer": "context"}, **CP}, calls("ppermute"), "1x8-no_vma"),
]
BY_NAME = {row.name: row for row in ROWS}

# ------------------------------------------------------------------------------------------------------------ no pairs

COPIES = {"copies", "copies with split moments", "copies, reduced once"}
MINIBATCHES = {"minibatches", "minibatches, reduced once", "copies, reduced once"}
ROUNDED = {"8-bit blocks", "bfloat16 gathers", "bfloat16 scatters"}
OTHER_PRODUCTS = {"recurrence", "attention of Flax", "context", "experts", "lookup by rows", "head by pieces"} | {
    f"split {part}" for part in ("layers", "sequence", "heads", "vocabulary")
}

# Every row of the first set is apart from every row of the second.
APART: list[tuple[set[str], set[str], str]] = [
    ({"plain"}, set(BY_NAME), "beside it a row is itself"),
    ({"copies, reduced once"}, COPIES | MINIBATCHES, "it has copies and minibatches already"),
    ({"several axes"}, COPIES, "an axis splits or copies"),
    ({"remat"}, {"prefetch"}, "scan_layers computes its layers again by itself, and refuses nn.remat"),
    ({"nnx"}, {"from outside"}, "a model of NNX is always wrapped from outside"),
    ({"statistics", "fp8"}, MINIBATCHES, "statistics and scales are then those of a minibatch"),
    ({"fp8"}, OTHER_PRODUCTS, "a weight without an fp8 product would travel in blocks of 8 bits, which round"),
    ({"fp8"}, ROUNDED, "what has been rounded otherwise may be another value of fp8, 2^-4 away"),
    ({"8-bit blocks"}, {"lookup by rows"}, "in blocks of 8 bits the whole table is fewer bytes than its rows"),
    ({"minibatches, reduced once"}, {"lookup by rows"}, "what is gathered once for all minibatches is gathered whole"),
    ({"experts"}, ROUNDED, "a token whose choice is close goes to another expert"),
    ({"muon", "adafactor"}, ROUNDED, "they divide by gradients, so that rounding in small ones is a whole step"),
]

# Pairs whose rounding is larger than that of each row, with the tolerance of the pair.
#
# Adafactor divides an entry of a gradient by the root of its mean square. In the column 1x8-no_vma the entry 15 of the
# gradient of "first/bias" is 2.1e-4 in the second step, beside a largest entry of 0.60: float32 errs by 3.3e-8 there,
# half an epsilon of the largest, and so by 1.6e-4 of the entry. The update is the entry over the root of
# 0.43 * 2.5e-3**2 + 0.57 * 2.1e-4**2, 0.13 of a whole step of 1e-5, and errs by 0.13 * 1.6e-4 * 1e-5 = 2e-10: by 1e-5
# of the largest entry of the bias, 2.1e-5, which began at zero. Against the same training in float64 the mesh is off by
# 1.0e-5, and one device by 1.4e-6.
ROUNDED_PAIRS = {frozenset({"nnx", "adafactor"}): 2e-5}

# Rows and pairs that the library refuses: the rows, a part of the columns' names, and its words.
REFUSED: list[tuple[set[str], str, str]] = [
    ({"padding", "logical names"}, "", "boxed as .* shards do not divide dim 1 of size 15"),
    ({"prefetch", "statistics"}, "", "collection is empty"),
    ({"prefetch", "fp8"}, "", "collection is empty"),
    ({"prefetch", "logical names"}, "", '"partition_name" is not specified'),
]

# Faults of the library that are not mended yet: the rows, a part of the columns' names, and what is seen. A cell that
# is without its fault fails, and leaves the list.
FAULTS: list[tuple[set[str], str, str]] = []

# Cells that are tried at every commit: a mutation of the library shows in them alone.
ALWAYS = ["scan + context @ 2x4-vma"]


def why_apart(first: Row, second: Row) -> str:
    """Returns why two rows are no pair, or nothing.

    >>> why_apart(BY_NAME["copies"], BY_NAME["several axes"])
    'an axis splits or copies'
    >>> why_apart(BY_NAME["remat"], BY_NAME["weighted"])
    ''
    """
    for some, others, reason in APART:
        if (first.name in some and second.name in others) or (second.name in some and first.name in others):
            return reason
    decided = {(field, name): value for field, name, value in decisions(first.changes)}
    for field, name, value in decisions(second.changes):
        if (field, name) in decided and decided[field, name] != value:
            return f"both decide {field} {name}".rstrip()
    parts = {name for row in (first, second) for field, name, _ in decisions(row.changes) if field == "parts"}
    if "nnx" in (first.name, second.name) and (parts - TWIN_FIELDS or "prefetch" in (first.name, second.name)):
        return f"the twin in NNX has no {', '.join(sorted(parts - TWIN_FIELDS)) or 'scan_layers'}"
    return ""
