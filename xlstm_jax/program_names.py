"""Names that the library writes into programs, and by which forecasts, profiles and guards find its parts there.

``xlstm_jax.forecast`` reads this file, the equations of a jaxpr (``equations``) and the facts about accelerators
(``accelerators``), and nothing else of a training.
"""

GATHER_SCOPE = "gather_params"  # all gathers of parameters
BLOCK_INPUT = "block_input"  # the input of each wrapped module, kept or offloaded by this name
LOOKUP_SCOPE = "lookup_rows"  # lookups by rows, in place of a gather
UNBALANCED_SCOPE = "unbalanced_ring"  # a ring over the sequence in natural order, half of which waits
BLOCK_FORMATS = ("int8", "float8_e4m3fn")  # of blocks with scales on the wire
PACK_SCOPES = frozenset(f"{way}_{name}" for way in ("pack", "unpack") for name in BLOCK_FORMATS)
HOST_MEMORY = "pinned_host"  # JAX's name of the memory of the host that a device reaches by itself
# The names that ``DeviceMeshManager.create_fsdp_mesh`` gives to axes that cross slices or hosts, over slow links: the
# default of ``inter_host_axes``.
SLICE_AXIS, HOST_AXIS = "fsdp_slice", "fsdp_host"
INTER_HOST_AXES = (SLICE_AXIS, HOST_AXIS)
# Metrics of a step, which a guard of the loop reads: how many updates were skipped in all, and since the last good one.
SKIPPED_STEPS, SKIPPED_IN_A_ROW = "skipped_steps", "skipped_in_a_row"
