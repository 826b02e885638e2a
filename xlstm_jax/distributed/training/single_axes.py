"""Lets a model reduce over axes of the batch that have a single device, under ``check_vma=True``.

Axes of size 1 are left out of specs and collectives: on a mesh of shape (1, 8) the rows of a device vary by type along
"fsdp", and not along "dp". A model may name all axes of the batch (``nn.BatchNorm(axis_name=("dp", "fsdp"))``), as it
must on other meshes, and JAX refuses a sum over axes along some of which the operand varies and along others not.

  call     loss_fn(params, ..., rows)                  most models: nothing is cast, and nothing else is compiled
  refused  loss_fn(cast(params), ..., cast(rows))      cast to varying along axes of size 1, as on a larger mesh

The reductions of the step, over the axes along which values vary by type, take the casts off again.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.introspection import MIXED_AXES


def with_single_axes(fn: Callable[..., Any], axes: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a function that calls ``fn``, a loss or evaluation function, and accepts reductions over single devices.

    The model in ``fn`` may then name all ``axes``, the axes of the batch, in a reduction. If JAX refuses the reduction
    for an axis of size 1, ``fn`` is called again with arguments of other types: each array that varies along some of
    the axes then varies along those of size 1, too. The values are the same.
    """

    @wraps(fn)
    def called(*args: Any, **others: Any) -> Any:
        try:
            return fn(*args, **others)
        except ValueError as error:
            single = [axis for axis in axes if collectives.axis_size((axis,)) == 1 and collectives.is_tracked(axis)]
            if not MIXED_AXES.search(str(error)) or not single:
                raise

        def cast(x: Any) -> Any:
            varies = isinstance(x, jax.Array) and not collectives.varying_axes(x).isdisjoint(axes)
            return collectives.to_varying(x, single) if varies else x

        # The equations of the first call have no results, and are not compiled.
        return fn(*jax.tree.map(cast, args), **others)

    return called
