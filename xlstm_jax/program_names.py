"""Names that the library writes into programs. Forecasts, profiles and guards search programs for the names.

``xlstm_jax.forecast``, outside of its folder ``training``, reads programs of any JAX code. Of the library's code for
trainings it imports only this file, ``equations`` (reads jaxprs) and ``accelerators`` (facts about devices).
"""

GATHER_SCOPE = "gather_params"  # every gather of parameters
BLOCK_INPUT = "block_input"  # the input of each wrapped module, kept or offloaded by this name
LOOKUP_SCOPE = "lookup_rows"  # lookups by rows, in place of a gather
UNBALANCED_SCOPE = "unbalanced_ring"  # causal ring attention, tokens in natural order: devices wait for the last device
BLOCK_FORMATS = ("int8", "float8_e4m3fn")  # dtypes of blocks with scales on the wire
PACK_SCOPES = frozenset(f"{way}_{name}" for way in ("pack", "unpack") for name in BLOCK_FORMATS)
HOST_MEMORY = "pinned_host"  # JAX's name of host memory that a device can access directly
FSDP_AXIS = "fsdp"  # name of ``create_fsdp_mesh`` for a single axis; the names of several axes begin with "fsdp_"
# Names of ``DeviceMeshManager.create_fsdp_mesh`` for axes across slices or hosts, over slow links: the default of
# ``inter_host_axes``.
SLICE_AXIS, HOST_AXIS = "fsdp_slice", "fsdp_host"
INTER_HOST_AXES = (SLICE_AXIS, HOST_AXIS)
# Step metrics that a guard of the loop reads: number of skipped updates, in total and since the last good update.
SKIPPED_STEPS, SKIPPED_IN_A_ROW = "skipped_steps", "skipped_in_a_row"
