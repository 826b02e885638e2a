"""Checks of collections: of a new state, and of the collections returned by a step."""

from xlstm_jax.distributed.training.collections import check_equal_collections, check_kept
from xlstm_jax.distributed.training.moments import CreatedState, Results, TrainingCheck


def _of_state(of: CreatedState) -> None:
    check_kept(of.collections)


def _of_results(of: Results) -> None:
    spread = [axis for axis, size in of.mesh.shape.items() if size > 1]
    check_equal_collections(of.equations.of_marked, of.collections, spread, of.axes)


COLLECTIONS_OF_STATE = TrainingCheck("state", _of_state, "collections.md", needs="collections")
EQUAL_COLLECTIONS = TrainingCheck("results", _of_results, "collections.md", needs="collections")
