"""``on_unsharded_matrices``: runs any optax rule for matrices on owner devices, which store the rule's state."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import rebox
from xlstm_jax.distributed.data_parallel.store import UNCHANGED_STORE
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import axes_entry
from xlstm_jax.distributed.optimizers.matrices.dimensions import MatrixChoice, choices_of
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixGroup
from xlstm_jax.distributed.optimizers.matrices.layout import (
    FirstPlaces,
    Owned,
    Place,
    Values,
    map_groups,
    named_groups,
    place_of,
    report_matrices,
)
from xlstm_jax.distributed.optimizers.matrices.owners import from_owners, to_owners
from xlstm_jax.distributed.optimizers.transforms import check_transform


class UnshardedMatricesState(NamedTuple):
    """State of ``on_unsharded_matrices``: the rule's state by name of the group, with leaves [matrices, ...]."""

    of_owners: dict[str, PyTree]


def on_unsharded_matrices(
    tx: optax.GradientTransformation,
    dimension_numbers: Any = None,
) -> optax.GradientTransformation:
    """Runs an optax rule for a single matrix on every matrix of a tree, each unsharded on its owner device.

    For rules that combine elements of a matrix and keep arrays of other shapes: Shampoo, SOAP, projections. The rule
    gets every matrix as an array of two dims with no more rows than columns (else its transpose). Each matrix has a
    separate state, stored by its owner. Leaves that are not matrices pass through unchanged.

    >>> tx = optax.chain(on_unsharded_matrices(optax.contrib.normalize()), optax.scale(-1.0))
    >>> params = {"kernel": jnp.full((2, 3, 4), 2.0), "norm": {"scale": jnp.ones((2, 3))}}  # two layers
    >>> updates, _ = tx.update(params, tx.init(params))
    >>> updates["kernel"][0, 0, 0], updates["norm"]["scale"][0, 0]  # 12 entries of 2, the norm of which is 48 ** 0.5
    (Array(-0.28867513, dtype=float32), Array(-1., dtype=float32))

    Args:
      tx: a rule for a single matrix. The rule is initialised on zeros, and gets no parameters: apply weight decay later
        in the chain.
      dimension_numbers: the leaves that are matrices; as for ``muon``.
    Returns:
      The transform, for ``make_train_step``, inside ``shard_map`` on boxed trees, or on one device.
    Raises:
      ValueError: (in ``init`` and ``update``) as ``matrix_dimensions``; or stacked layers are split over devices, and
        the devices that share a part of the layers do not divide the number of matrices in the part.
      TypeError: ``tx`` is not a transform.
    """
    check_transform(tx, "on_unsharded_matrices")

    def init(params: PyTree) -> UnshardedMatricesState:
        choices = choices_of(dimension_numbers, params)
        report_matrices("on_unsharded_matrices", params, choices, any_order=False)
        place = place_of(params)
        groups = named_groups(place.groups(choices, any_order=False))
        return UnshardedMatricesState({name: _state_of(tx, group, place) for name, group in groups.items()})

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        choices: Mapping[str, MatrixChoice] = choices_of(dimension_numbers, updates)
        of_each: PyTree = jax.vmap(tx.update)

        def of_groups(groups: Sequence[MatrixGroup], values: Values, state: Mapping[str, PyTree]) -> Any:
            new: Values = {}
            states: dict[str, PyTree] = {}
            for name, group in named_groups(groups).items():
                with jax.named_scope(f"whole_{group.name}"):
                    matrices = to_owners(group, values)
                    updates, new_state = of_each(matrices, trees.stored_values(state[name]))
                    new |= from_owners(group, updates)
                states[name] = trees.map_leaves(rebox, state[name], new_state)
            return new, states

        updates, states = map_groups(of_groups, updates, choices, state.of_owners)
        return updates, UnshardedMatricesState(states)

    return optax.GradientTransformation(init, update)


def _state_of(tx: optax.GradientTransformation, group: MatrixGroup, place: Place) -> PyTree:
    """Returns the initial state of the rule ``tx`` for the matrices of a group, with leaves [matrices, ...].

    A group has matrices of equal form, which owner devices update. If mesh axes split the matrices, each leaf is in a
    box that splits the first dim over the owners, with empty places at the end for an equal number per owner. Outside
    of ``shard_map`` the state is global; inside, it is for the matrices of this device.

    Args:
      tx: the rule, whose ``init`` gets zeros [rows, columns] in place of each matrix.
      group: the matrices and their owners.
      place: the layout of the leaves, with the mesh and the sizes of its axes.
    Raises:
      ValueError: stacked layers are split over devices, and the owners do not divide the number of matrices in a part.
    """
    axes = (*group.form.stack_axes, *group.axes)
    stacks = math.prod(place.sizes[axis] for axis in group.form.stack_axes)
    left_over = group.places_per_owner * group.num_owners - group.count
    # Empty places would be between the matrices of two parts, and a box can only have empty places at the end.
    if left_over and stacks > 1:
        raise ValueError(
            f"on_unsharded_matrices: {group.leaves[0].path!r} has {group.count} matrices on each of {stacks} parts of "
            f"the mesh, which the {group.num_owners} devices of a part do not divide. Split the leaf along another dim."
        )
    places = group.places_per_owner * (1 if place.mesh is None else group.num_owners * stacks)
    zeros = jnp.zeros((places, group.form.rows, group.form.columns), group.form.dtype)
    # A state for each matrix: a rule's count becomes a vector of counts.
    state = jax.vmap(tx.init)(zeros)

    def boxed(leaf: jax.Array) -> Any:
        store = FirstPlaces(group.count) if left_over else UNCHANGED_STORE
        return Owned(leaf, (axes_entry(axes), *[None] * (leaf.ndim - 1)), store=store) if axes else leaf

    if place.mesh is None and axes:
        # Zeros are replicated. Later states are not, and the type of a state must not change.
        state = collectives.to_varying(state, axes)
    return jax.tree.map(boxed, state)
