"""Checks of collections: of a new state, and of the collections returned by a step."""

from xlstm_jax.distributed.training.collections import check_equal_collections, check_kept
from xlstm_jax.distributed.training.moments import CreatedState, Results, TrainingCheck


def _of_state(context: CreatedState) -> None:
    check_kept(context.collections)


def _of_results(context: Results) -> None:
    spread = [axis for axis, size in context.mesh.shape.items() if size > 1]
    check_equal_collections(context.equations.of_marked, context.collections, spread, context.axes)


COLLECTIONS_OF_STATE = TrainingCheck("state", _of_state, "collections.md", needs="collections")
EQUAL_COLLECTIONS = TrainingCheck("results", _of_results, "collections.md", needs="collections")
