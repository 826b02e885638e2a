"""Groups of matrices to send together, and their owners, the devices that update unsharded matrices.

Matrices of equal form, transposed so that the shorter side is first, form a group. A group is stacked, sent by a single
all-to-all, updated as a batch, and returned by a second all-to-all. With M matrices and D owners each owner has
ceil(M / D) places; an empty place holds zeros.

The owners are the devices along the axes that split the matrices. Along further axes devices have copies of the same
shards, and may be owners, too: a group adds the fewest further axes that minimise the work of each device. Along the
remaining axes devices repeat the same work.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry, entry_axes
from xlstm_jax.distributed.optimizers.matrices.dimensions import MatrixChoice

Axes = tuple[str, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class MatrixForm:
    """Common properties of the matrices of a group. Dims are in the order: shorter side, longer side.

    Attributes:
      short, long: sizes of the dims of each side, without padding.
      stored: sizes of the dims of both sides, with padding.
      splits: (dim, axes) for each split dim.
      stack_axes: axes that split the matrices of a stack; along these axes devices have different matrices.
      dtype: dtype of the values.
    """

    short: Shape
    long: Shape
    stored: Shape
    splits: tuple[tuple[int, Axes], ...]
    stack_axes: Axes
    dtype: str

    @property
    def rows(self) -> int:
        return math.prod(self.short)

    @property
    def columns(self) -> int:
        return math.prod(self.long)

    @property
    def true(self) -> Shape:
        """Sizes of a matrix's dims without padding: the dims of the shorter side, then those of the longer side.

        A side may have several dims: (64, 4, 32) for matrices 64 x 128 in a kernel of 64 features, 4 heads and size 32.
        """
        return (*self.short, *self.long)

    @property
    def split_axes(self) -> Axes:
        return tuple(axis for _, axes in self.splits for axis in axes)


@dataclass(frozen=True)
class MatrixLeaf:
    """Leaf whose matrices belong to a group.

    ``order`` lists the leaf's dims: the dims that count matrices, then the shorter side, then the longer side.
    ``stack`` has the local sizes of the dims that count matrices.
    """

    path: str
    order: tuple[int, ...]
    stack: Shape

    @property
    def count(self) -> int:
        return math.prod(self.stack)


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices to send together, and their owner devices.

    Attributes:
      form: shapes, dtype and split of each matrix, equal for the group.
      leaves: the leaves with the matrices, in order.
      copy_axes: axes along which devices have equal shards, and share the work.
      copy_axes_dim: the dim split again along ``copy_axes``, so that devices with equal shards send different parts;
        None without copies.
      axes: the axes of the owners, in mesh order, outermost first.
      num_owners: number of devices that share the work; each has ``places_per_owner`` places for matrices.
      first_place: index of the first owner among the devices of a round; 0 unless ``in_rounds`` sends several groups
        together.
    """

    form: MatrixForm
    leaves: tuple[MatrixLeaf, ...]
    copy_axes: Axes
    copy_axes_dim: int | None
    axes: Axes
    num_owners: int
    first_place: int = 0

    @property
    def name(self) -> str:
        return f"{self.form.rows}x{self.form.columns}"

    @property
    def count(self) -> int:
        """Number of matrices of which a device has shards.

        Along ``axes`` each device has a shard of each of these matrices. If axes split stacked layers
        (``form.stack_axes``), devices along them have other matrices, which do not count.
        """
        return sum(leaf.count for leaf in self.leaves)

    @property
    def places_per_owner(self) -> int:
        return -(-self.count // self.num_owners)

    @property
    def splits_when_sent(self) -> tuple[tuple[int, Axes], ...]:
        """(dim, axes) for each dim along which a matrix is cut into the slices that devices exchange with owners.

        Owners are the devices that update unsharded matrices. Dims count from 0: dims of the shorter side, then of the
        longer side. Listed are the dims that are split over devices; and, if devices with equal shards send different
        parts of a shard, the dim of the parts, with the axes of these devices innermost.
        """
        if self.copy_axes_dim is None:
            return self.form.splits
        split_axes = dict(self.form.splits)
        return tuple(
            sorted(
                (split_axes | {self.copy_axes_dim: (*split_axes.get(self.copy_axes_dim, ()), *self.copy_axes)}).items()
            )
        )


def matrix_leaf(
    choice: MatrixChoice,
    local: Shape,
    names: Sequence[AxisEntry],
    sizes: Mapping[str, int],
    dtype: str,
    any_order: bool,
) -> tuple[MatrixForm, MatrixLeaf]:
    """Returns the ``MatrixForm`` of a leaf's matrices, and a ``MatrixLeaf`` with the dims in the order of the form.

    Leaves of equal form (sizes, split and dtype of a matrix) are grouped. The order is: dims that count matrices,
    shorter side, longer side.

    Args:
      choice: dims of the inputs and outputs of the leaf's matrices; ``choice.dims`` must not be None.
      local: shape of the shard of a device.
      names: for each dim the axes that split the dim.
      sizes: sizes of the mesh axes, in mesh order.
      dtype: name of the dtype of the leaf.
      any_order: True: owners (devices that update unsharded matrices) merge shards in the axis order of the mesh;
        False: in the axis order of the leaf. If True, leaves split over the same axes in different orders have the same
        form; but the optimizer's rule must not depend on the order of rows and columns.
    """
    ndim = len(local)
    inputs, outputs = choice.axes
    # Muon of a transpose is the transpose, and the Gram matrix of the shorter side is smaller.
    if math.prod(choice.shape[dim] for dim in inputs) > math.prod(choice.shape[dim] for dim in outputs):
        inputs, outputs = outputs, inputs
    stack = tuple(dim for dim in range(ndim) if dim not in (*inputs, *outputs))
    spread = [tuple(axis for axis in entry_axes(entry) if sizes.get(axis, 1) > 1) for entry in names]
    stored = [size * math.prod(sizes[axis] for axis in axes) for size, axes in zip(local, spread, strict=True)]
    sides = (*inputs, *outputs)
    if any_order:
        # The padding of a dim must be last after the merge, so a padded dim keeps its axis order.
        padded = [dim for dim in sides if stored[dim] != choice.shape[dim]]
        spread = [axes if dim in padded else _in_order(axes, sizes) for dim, axes in enumerate(spread)]
    form = MatrixForm(
        short=tuple(choice.shape[dim] for dim in inputs),
        long=tuple(choice.shape[dim] for dim in outputs),
        stored=tuple(stored[dim] for dim in sides),
        splits=tuple((i, spread[dim]) for i, dim in enumerate(sides) if spread[dim]),
        stack_axes=tuple(axis for dim in stack for axis in spread[dim]),
        dtype=dtype,
    )
    return form, MatrixLeaf(choice.path, (*stack, *sides), tuple(local[dim] for dim in stack))


def _in_order(axes: Axes, sizes: Mapping[str, int]) -> Axes:
    return tuple(axis for axis in sizes if axis in axes)


def grouped(leaves: Iterable[tuple[MatrixForm, MatrixLeaf]], sizes: Mapping[str, int]) -> list[MatrixGroup]:
    """Groups leaves of equal form; returns the groups, each with its owner devices, largest work first.

    The form has sizes, split and dtype of a matrix; owners are the devices that update unsharded matrices. A large
    group is then computed while smaller groups are sent. ``leaves`` has results of ``matrix_leaf``; ``sizes`` are the
    sizes of the mesh axes, in mesh order.
    """
    by_form: dict[MatrixForm, list[MatrixLeaf]] = defaultdict(list)
    for form, leaf in leaves:
        by_form[form].append(leaf)
    groups = [_owned(MatrixGroup(form, tuple(members), (), None, (), 1), sizes) for form, members in by_form.items()]
    # rows^2 * columns is proportional to the FLOP of a matrix product in Newton-Schulz.
    return sorted(groups, key=lambda group: -group.places_per_owner * group.form.rows**2 * group.form.columns)


def in_rounds(groups: Sequence[MatrixGroup]) -> list[list[MatrixGroup]]:
    """Divides groups of matrices into rounds, and returns the rounds in order: lists of groups to send together.

    A small group alone would leave owners without work. A group joins the first round with the same owner devices and
    dtype that has a free owner for each matrix of the group; ``first_place`` of the group is the first of these owners.
    If there is no such round, the group starts a round. A round takes as long as its largest matrix. Only for rules
    without state, because the owner of a matrix depends on the remaining groups.
    """
    rounds: list[list[MatrixGroup]] = []
    for group in groups:
        fitting = [members for members in rounds if _fits(group, members)]
        if fitting:
            last = fitting[0][-1]
            fitting[0].append(replace(group, first_place=last.first_place + last.count))
        else:
            rounds.append([group])
    return rounds


def _fits(group: MatrixGroup, members: Sequence[MatrixGroup]) -> bool:
    kinds = {(other.axes, other.form.stack_axes, other.form.dtype) for other in (group, members[0])}
    return len(kinds) == 1 and sum(other.count for other in members) + group.count <= group.num_owners


def _owned(group: MatrixGroup, sizes: Mapping[str, int]) -> MatrixGroup:
    """Returns ``group`` with its owner devices: along the axes that split the matrices, and along some axes of copies.

    Along axes of copies devices have equal shards. Of these axes, the fewest are added that minimise the number of
    matrices per owner; none for a group of fewer values than ``DEFAULT_MIN_WEIGHT_SIZE``. ``sizes`` are the sizes of
    the mesh axes, in mesh order.
    """
    form = group.form
    owners = math.prod(sizes[axis] for axis in form.split_axes)
    alone = replace(group, axes=_in_order(form.split_axes, sizes), num_owners=owners)
    # For this little work, computing on every copy is faster than sending.
    if group.count * form.rows * form.columns < DEFAULT_MIN_WEIGHT_SIZE:
        return alone
    others = [axis for axis, size in sizes.items() if size > 1 and axis not in (*form.split_axes, *form.stack_axes)]
    shared = [_with_copies(alone, tuple(others[:n]), sizes) for n in range(1, len(others) + 1)]
    # More owners than needed for the least work would only add traffic.
    return min([alone, *filter(None, shared)], key=lambda candidate: (candidate.places_per_owner, candidate.num_owners))


def _with_copies(group: MatrixGroup, copies: Axes, sizes: Mapping[str, int]) -> MatrixGroup | None:
    """Returns the group with further owners along the axes ``copies``, along which devices have equal shards.

    The largest dim of the shards that the number of copies divides is split again along these axes. Returns None if
    there is no such dim. ``sizes`` are the sizes of the mesh axes.
    """
    count, local = math.prod(sizes[axis] for axis in copies), list(group.form.stored)
    for dim, axes in group.form.splits:
        local[dim] //= math.prod(sizes[axis] for axis in axes)
    fitting = [dim for dim, size in enumerate(local) if size % count == 0]
    if not fitting:
        return None
    dim = max(fitting, key=lambda dim: local[dim])
    axes = _in_order((*group.axes, *copies), sizes)
    return replace(group, copy_axes=copies, copy_axes_dim=dim, axes=axes, num_owners=group.num_owners * count)
