"""Check of the axes over which a device's loss or weight varies by its type, before it is averaged over devices."""

import jax

from xlstm_jax.distributed.data_parallel.wire import collectives


def check_axes(value: jax.Array, axes: tuple[str, ...], subject: str) -> None:
    """Raises a ``ValueError`` if the type of a loss or weight varies over other axes than the axes to average over.

    The value must vary over each of ``axes`` with several devices, and over no other axis. ``subject`` names the value
    in the error, as "the loss". Types show this under ``check_vma=True`` alone.
    """
    varying = collectives.varying_axes(value)
    for axis in collectives.spread_axes(axes):
        if collectives.is_tracked(axis) and axis not in varying:
            raise ValueError(
                f"{subject} that loss_fn returned does not vary over {axis!r} (its type is {jax.typeof(value)}): it "
                "was reduced over that axis already, or depends on neither parameters nor batch. Return the local "
                "value of this device, which is averaged here, and a constant weight as a Python number."
            )
    # JAX would sum the gradients of leaves that do not vary over such an axis, and no later mean would divide them.
    for axis in collectives.spread_axes(sorted(varying - set(axes))):
        raise ValueError(
            f"the loss varies over {axis!r}, which the axes to average over, {axes}, leave out: gradients of "
            f"replicated leaves would be summed over its {collectives.axis_size([axis])} devices. Name all axes along "
            f"which the batch or gathered weights differ, or reduce over {axis!r} in the model (tensor parallel)."
        )
