"""The leaves of one model under the names of another."""

from collections.abc import Mapping
from typing import Any

from flax.traverse_util import unflatten_dict

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees


def rename_leaves(tree: PyTree, names: Mapping[str, str]) -> dict[str, Any]:
    """The tree with its leaves at other paths: for the parameters of one model under the names of another.

    >>> linen = {"Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "Dense_1": {"kernel": jnp.ones((3, 2))}}
    >>> nnx = rename_leaves(linen, {"Dense_0": "up", "Dense_1": "mlp/down"})
    >>> jax.tree.map(jnp.shape, nnx)
    {'mlp': {'down': {'kernel': (3, 2)}}, 'up': {'bias': (3,), 'kernel': (2, 3)}}

    Args:
      tree: nested dicts; a box is one leaf.
      names: for the beginning of a path (whole parts of it), what stands there instead; the longest that fits counts,
        and a path that none fits stays. ``{new: old for old, new in names.items()}`` leads back.
    Raises:
      ValueError: two leaves would lie at one path, or a name fits no leaf.
    """
    renamed: dict[str, Any] = {}
    used: set[str] = set()
    for path, leaf in trees.leaves_with_path(tree):
        fitting = [name for name in names if path == name or path.startswith(f"{name}/")]
        old = max(fitting, key=len, default="")
        new = names[old] + path[len(old) :] if fitting else path
        if new in renamed:
            raise ValueError(f"'{path}' would lie at '{new}', where another leaf lies; give it a name of its own.")
        used |= set(fitting)
        renamed[new] = leaf
    if unused := sorted(names.keys() - used):
        paths = ", ".join(path for path, _ in trees.leaves_with_path(tree))
        raise ValueError(f"no path begins with {unused[0]!r}; the paths are {paths}.")
    return unflatten_dict(renamed, sep="/")
