"""The chip that a step is traced for, where its mesh has no devices that could be asked.

    with traced_for(chip.name):           a forecast, around the trace
        chip_of_mesh(abstract_mesh)       what depends on the chip, within

The name is part of the keys of JAX's caches: a step that was traced for a chip is traced anew for another one, and for
devices at hand.
"""

import jax

from xlstm_jax.distributed.hardware.chips import CHIPS, Chip, chip_of

traced_for = jax.make_user_context(None)


def chip_of_mesh(mesh: jax.sharding.AbstractMesh) -> Chip | None:
    """The chip of a mesh's devices, or of the forecast that traces; None where neither has published figures."""
    # Devices at hand come first: what is traced for them, they run.
    device = getattr(mesh, "abstract_device", None)
    return chip_of(device.device_kind) if device else CHIPS.get(traced_for.value or "")
