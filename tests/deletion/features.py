"""The features that can be deleted, and the features that cannot be deleted yet."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTED = Path(__file__).parents[2] / "xlstm_jax" / "distributed"


def without_docstrings(text: str) -> str:
    """Returns a source text without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_docstring and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@dataclass(frozen=True)
class Feature:
    """A feature beside the core.

    ``files`` are files and folders, relative to ``xlstm_jax/distributed``. ``knows`` is a regular expression of the
    names by which code outside of ``files`` would refer to the feature. ``own`` are the tests of the feature that name
    the feature by an option alone: files of ``tests``, and tests in the form of pytest's ``--deselect``.
    """

    name: str
    files: tuple[str, ...]
    knows: str
    own: tuple[str, ...] = ()

    def without_own(self, texts: Mapping[Path, str]) -> dict[Path, str]:
        """Returns the files that a deletion of the feature leaves."""
        own = [(DISTRIBUTED / name).resolve() for name in self.files]
        return {path: text for path, text in texts.items() if not any(path.is_relative_to(place) for place in own)}

    def known_in(self, texts: Mapping[Path, str]) -> int:
        """Returns how many files refer to the feature in code or texts of errors; faces do not count."""
        code = [without_docstrings(text) for path, text in texts.items() if path.name != "__init__.py"]
        return sum(bool(re.search(self.knows, text)) for text in code)


FEATURES = [
    Feature(
        "padding",
        ("data_parallel/extensions/padding.py",),
        r"\bZeroPadding\b|\bPadded\b|extensions\.padding\b",
        own=(
            "tests/data_parallel/test_padding.py",
            "tests/training/test_lowered_text.py::test_train_step_lowers_to_text_with_the_recorded_digest[replicas]",
            "tests/training/test_lowered_text.py::test_guard_digests_of_lowered_text_differ_between_cases",
        ),
    ),
    Feature(
        "copies of shards in a dtype of their own (Replicas)",
        ("data_parallel/extensions/replicas.py",),
        r"\bReplicas\b|extensions\.replicas\b",
    ),
    Feature(
        "packing of small leaves (PackSmall)",
        (
            "data_parallel/extensions/packed.py",
            "data_parallel/extensions/packing.py",
            "../forecast/hardware/packing.py",
        ),
        r"\bPackSmall\b|\bPackedGathers\b|\bPacking\b|extensions\.(packed|packing)\b|\bpacking(_limit)?\b",
    ),
    Feature(
        "gradients by all-reduce (AllReduceGradients)",
        ("data_parallel/extensions/all_reduce.py",),
        r"\bAllReduceGradients\b|extensions\.all_reduce\b",
    ),
    Feature(
        "blocks of 8 bits on the wire",
        ("data_parallel/wire/blocks.py", "data_parallel/wire/quantized.py"),
        r"\bBlocks\b|\bInBlocks\b|\bBLOCK_FORMATS\b|wire\.(blocks|quantized)\b",
    ),
    Feature(
        "fp8 products",
        ("data_parallel/extensions/fp8_products.py",),
        r"\bFp8Products\b|fp8_products",
    ),
    Feature(
        "scales that a minibatch overwrites",
        ("training/carries/overwritten_scales.py",),
        r"\bOverwrittenScales\b|overwritten_scales",
    ),
    Feature(
        "collections",
        (
            "training/collections.py",
            "training/carries/collection_carry.py",
            "training/carries/kept_collections.py",
            "training/carries/overwritten_scales.py",
            "training/checks/collections.py",
            "training/nnx_gradients.py",  # variables that a module changes are collections
        ),
        r"\bKeptCollections\b|\bCollectionCarry\b|training\.collections\b"
        r"|\bnnx_value_and_grad\b|\bcreate_nnx_module\b",
        own=("tests/training/test_collections.py", "tests/training/test_carries.py"),
    ),
    Feature(
        "carries of recurrent layers",
        ("data_parallel/extensions/recurrent_carries.py",),
        r"\bRecurrentCarries\b|recurrent_carries",
    ),
    Feature(
        "statistics under a mask, in NNX",
        ("data_parallel/extensions/nnx_masked_statistics.py",),
        r"\bNnxMaskedStatistics\b|nnx_masked_statistics",
        own=(
            "tests/data_parallel/test_nnx_masked_statistics.py",
            "tests/training/test_nnx_gradients.py::test_statistics_under_a_mask_are_those_of_the_unmasked_rows_of_all_devices",
        ),
    ),
    Feature(
        "statistics under a mask",
        ("data_parallel/extensions/masked_statistics.py", "data_parallel/extensions/nnx_masked_statistics.py"),
        r"\bMaskedStatistics\b|extensions\.masked_statistics\b",
        own=(
            "tests/errors/test_errors.py::test_row_raises_the_documented_error[masked-normalisation]",
            "tests/data_parallel/test_masked_statistics.py",
            "tests/data_parallel/test_nnx_masked_statistics.py",
            "tests/training/test_nnx_gradients.py::test_statistics_under_a_mask_are_those_of_the_unmasked_rows_of_all_devices",
        ),
    ),
    Feature(
        "lookups by rows, in NNX",
        ("data_parallel/extensions/nnx_rows.py",),
        r"\bNnxRowLookups\b|nnx_rows",
    ),
    Feature(
        "lookups by rows",
        ("data_parallel/extensions/rows.py", "data_parallel/extensions/nnx_rows.py", "data_parallel/wire/lookup.py"),
        r"\bRowLookups\b|extensions\.rows\b|wire\.lookup\b",
    ),
    Feature(
        "cross-entropy by chunks, and heads that are read by pieces",
        ("training/cross_entropy.py", "data_parallel/extensions/pieces.py", "data_parallel/wire/pieces.py"),
        r"\bPieceReaders\b|\bchunked_cross_entropy\b|\bLMHead\b|extensions\.pieces\b|wire\.pieces\b",
    ),
    Feature(
        "NNX",
        (
            "data_parallel/modules/nnx_errors.py",
            "data_parallel/modules/nnx_filters.py",
            "data_parallel/modules/nnx_model.py",
            "data_parallel/modules/nnx_module.py",
            "data_parallel/extensions/nnx_masked_statistics.py",
            "data_parallel/extensions/nnx_rows.py",
            "model_parallel/nnx_splitting.py",
            "training/nnx_gradients.py",
        ),
        r"\bnnx_model\b|\bNnxModel\b|modules\.nnx_|\bnnx_value_and_grad\b|\bcreate_nnx_module\b",
    ),
    Feature(
        "balance of links",
        ("data_parallel/link_balance.py",),
        r"\bLinkBalance\b|link_balance",
        # Over several axes a step without the feature is another program.
        own=("tests/training/test_lowered_text.py::test_train_step_lowers_to_text_with_the_recorded_digest[scan]",),
    ),
    Feature(
        "logical names",
        ("data_parallel/extensions/logical_names.py",),
        r"\bLogicalNames\b|\bLogicallyPartitioned\b|logical_names",
        own=("tests/model_parallel/test_split_logical_names.py",),
    ),
    Feature(
        "prefetch",
        ("data_parallel/prefetch.py", "data_parallel/modules/scan_layers.py"),
        r"\bscan_layers\b|\bprefetch\b",
    ),
    Feature("typed kernels", ("data_parallel/typed_kernel.py",), r"\btyped_kernel\b"),
    Feature("renaming", ("data_parallel/rename.py",), r"\bstack_layers\b|\bunstack_layers\b|data_parallel\.rename\b"),
    Feature("streaming of moments", ("optimizers/streaming.py",), r"\bwith_streaming\b|optimizers\.streaming\b"),
    Feature(
        "matrices (Muon)",
        ("optimizers/matrices", "plan/matrix_plan.py"),
        r"\bmuon\b|\bon_whole_matrices\b|\bMatrixPlan\b|optimizers\.matrices",
    ),
    Feature(
        "offload, and the forecasts and commands that search over it",
        ("optimizers/offload.py", "../forecast/training", "../cli"),
        r"\bOffload\b|\bNO_OFFLOAD\b|optimizers\.offload\b",
    ),
    Feature(
        "errors of custom steps that average wrongly",
        ("training/checks/averaging.py", "training/varying_params.py"),
        r"\bAVERAGED_ONCE\b|\bvarying_params\b|checks\.averaging\b",
        own=(
            "tests/training/test_averaged_once.py",
            *(
                f"tests/errors/test_errors.py::test_row_raises_the_documented_error[own-step-{name}]"
                for name in ("without-average", "without-average-or-types", "averages-shards")
            ),
        ),
    ),
    Feature("norms of each leaf", ("optimizers/leaf_norms.py",), r"\bwith_leaf_norms\b|\bleaf_norms\b"),
    Feature("averages of weights", ("optimizers/ema.py",), r"\bwith_ema\b|\bema_params\b"),
    Feature("skipped steps", ("optimizers/nonfinite.py",), r"\bskip_nonfinite\b|\bskip_counts\b"),
    Feature("replay of steps", ("training/replay",), r"\breplayed\b|\bReplayError\b|training\.replay\b"),
    Feature("faults", ("resilience", "training/replay"), r"\bLoopGuard\b|\bcheck_replicas\b|distributed\.resilience\b"),
    Feature(
        "publications",
        ("checkpoint/publication",),
        r"\bapply_publication\b|checkpoint\.publication\b",
        own=("tests/checkpoint/test_publish.py", "tests/checkpoint/test_follow.py", "tests/checkpoint/test_layout.py"),
    ),
    Feature(
        "checkpoints, and faults that read their checksums",
        ("checkpoint", "resilience", "training/replay"),
        r"\bCheckpointer\b|distributed\.checkpoint\b",
    ),
    Feature(
        "plans, and the forecasts and commands that are made of them",
        ("plan", "training/checks/replicated_parameters.py", "../forecast/training", "../cli"),
        r"\bplan_sharding\b|distributed\.plan\b",
    ),
    Feature(
        "experts",
        (
            "model_parallel/experts.py",
            "model_parallel/router.py",
            "plan/expert_plan.py",
            "../forecast/training/dispatch.py",
            "../forecast/training/linting/expert_rules.py",
        ),
        r"\bExperts\b|parallel\.experts\b|\bExpertPlan\b|\bdispatch\(",
    ),
    Feature(
        "tensor parallel, and the cross-entropy of heads that are split so",
        (
            "model_parallel/activations.py",
            "model_parallel/attention.py",
            "model_parallel/dense.py",
            "model_parallel/embedding.py",
            "model_parallel/nnx_splitting.py",
            "model_parallel/split_input.py",
            "model_parallel/splitting.py",
            "training/cross_entropy.py",
        ),
        r"\bsplit_modules\b|\bColumnDense\b|\bRowDense\b|parallel\.(activations|dense|splitting)\b",
    ),
    Feature(
        "context parallel",
        ("model_parallel/context.py", "model_parallel/recurrence.py"),
        r"\bcontext_parallel_attention\b|parallel\.context\b",
    ),
    Feature("remat policy", ("data_parallel/remat.py",), r"\bremat_policy\b|data_parallel\.remat\b"),
    Feature(
        "checks of arguments and mistakes",
        ("training/checks", "training/mistakes.py", "training/equal_results.py", "training/first_batch.py"),
        r"\bwarn_of_\w+|training\.(checks|mistakes|equal_results|first_batch)\b",
        own=(
            "tests/training/test_training.py::test_value_and_grad_raises_for_a_batch_axis_missing_from_axis_names",
            "tests/training/test_collections.py::test_train_step_raises_for_batch_norm_statistics_not_reduced_over_batch_axes",
        ),
    ),
    Feature("check_step", ("training/step_check",), r"\bcheck_step\b|\bstep_check\b"),
]

# Why a feature cannot be deleted, or not yet.
NOT_YET: dict[str, str] = {}

# Features without a row, and why each cannot be deleted.
WITHOUT_ROW = {
    "frozen parameters": "`trainable` is a field of a leaf: the gather, its gradient and the optimizer read it",
}
