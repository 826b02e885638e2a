"""Device groups of a collective, and the mesh axes of the groups.

HLO text lists the groups, computes them, or gives mesh axes; these three forms describe the same groups:
    replica_groups={{0,1},{2,3}}
    replica_groups=[2,2]<=[4]             ids in order, two groups of two;  <=[2,2]T(1,0) transposes them first
    replica_groups=mesh['dp'=2,'fsdp'=2] {'fsdp'}
An id is the position of a device in the flattened mesh, whose last axis runs fastest.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from xlstm_jax.forecast.hlo.text import integers

Groups = tuple[tuple[int, ...], ...]

_PAIRS = re.compile(r"source_target_pairs=\{(|.*?\})\}")  # a permute has pairs in place of groups
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_MESH = re.compile(
    r"replica_groups=@?mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\) )?\s*\{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"['\"]?([\w.\-]+)['\"]?=(\d+)")
_MESH_GROUP_AXIS = re.compile(r"['\"]?([\w.\-]+)['\"]?(?::\((\d+)\)(\d+))?")


def replica_groups(attributes: str) -> Groups:
    """Parses the groups of a collective to device ids: a tuple for each group of devices that exchange data.

    ``attributes`` is the text behind the operands of the instruction. An id is a position in the flattened mesh. For a
    permute a group has the devices that are connected by pairs of sender and receiver, sorted; ((0,),) without pairs.
    () if the text names no groups: then all devices form a single group.

    Raises:
      ValueError: the groups have an unknown form.
    """
    if match := _PAIRS.search(attributes):
        group: dict[int, set[int]] = {}
        for pair in _listed(match[1]):
            # The devices of a group share a set; a pair that connects two groups merges both into a new set.
            merged = {other for device in pair for other in group.get(device, {device})}
            group.update(dict.fromkeys(merged, merged))
        return tuple(sorted({tuple(sorted(devices)) for devices in group.values()})) or ((0,),)
    if "replica_groups=" not in attributes:
        return ()
    if match := _LISTED.search(attributes):
        return tuple(group for group in _listed(match[1]) if group)
    if match := _IOTA.search(attributes):
        return tuple(map(tuple, _iota(match[2], match[3]).reshape(integers(match[1])).tolist()))
    if match := _MESH.search(attributes):
        return _mesh_groups(*match.groups())
    start = attributes.index("replica_groups=")
    raise ValueError(f"these groups of devices have a form that is not known here: {attributes[start : start + 80]!r}.")


def _listed(text: str) -> Groups:
    return tuple(integers(group) for group in re.findall(r"\{([\d,]*)\}", text))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    # <=[2,4]T(1,0): the ids in order, as an array of these dims, then transposed.
    sizes = integers(dims)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(integers(permutation)) if permutation else ids


def _mesh_groups(axes: str, id_dims: str | None, permutation: str | None, over: str) -> Groups:
    """Parses ``mesh['a'=2,'b'=4] {'b'}`` to groups of device ids; ids in a group differ along the axes in braces.

    The result for this text is ((0, 1, 2, 3), (4, 5, 6, 7)). The braces may name a factor of an axis: ``'b':(2)2`` is
    the second of the two factors of size 2.

    Args:
      axes: text in the brackets of ``mesh[...]``: names and sizes of the axes.
      id_dims, permutation: texts of ``device_ids=([...]T(...))``, the order of the ids; None: ascending order.
      over: text in the braces: the axes, or factors of axes, of a group.
    """
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    ids = _iota(id_dims or str(math.prod(sizes.values())), permutation)
    dims: list[int] = []
    grouped: list[bool] = []
    chosen = {name: (int(before or 1), int(size or 0)) for name, before, size in _MESH_GROUP_AXIS.findall(over)}
    for name, size in sizes.items():
        before, factor = chosen.get(name, (size, 1))
        factor = factor or size
        # An axis becomes three dims: the part before the named factor, the factor, and the part behind.
        dims += [before, factor, size // (before * factor)]
        grouped += [False, name in chosen, False]
    return _groups_along(ids.reshape(dims), grouped)


def _groups_along(ids: np.ndarray, grouped: Sequence[bool]) -> Groups:
    """Splits an array of device ids, with a dim for each mesh axis, into groups along some of the dims.

    ``grouped`` says for each dim whether ids in a group differ along this dim. Example: ids [[0, 1], [2, 3]] with
    grouped (False, True) are the groups ((0, 1), (2, 3)).
    """
    order = sorted(range(ids.ndim), key=grouped.__getitem__)  # grouped dims come last
    in_group = math.prod(size for size, inside in zip(ids.shape, grouped, strict=True) if inside)
    return tuple(map(tuple, ids.transpose(order).reshape(-1, in_group).tolist()))


def axes_of_groups(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes along which the devices of each group differ, in mesh order.

    None if no set of axes gives these groups, or without groups; () if each group is a single device. Axes of size 1
    are left out, because nothing is sent along them.

    Args:
      groups: device ids of each group; an id is a position in the flattened mesh.
      axis_sizes: size of each mesh axis, outermost first.
    """
    sizes = {axis: size for axis, size in axis_sizes.items() if size > 1}
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    expected = set(map(frozenset, groups))
    # A mesh has few axes, so every subset is tried, the smallest first.
    for axes in (axes for n in range(len(sizes) + 1) for axes in itertools.combinations(sizes, n)):
        if {len(group) for group in expected} == {math.prod(sizes[axis] for axis in axes)}:
            along = _groups_along(ids, [axis in axes for axis in sizes])
            if expected == set(map(frozenset, along)):
                return axes
    return None
