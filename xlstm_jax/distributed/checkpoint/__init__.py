"""Checkpoints with checksums, for the same or a different mesh; export, import and publication of safetensors files."""

from xlstm_jax.distributed.checkpoint.checkpointer import Checkpointer
from xlstm_jax.distributed.checkpoint.errors import CheckpointError
from xlstm_jax.distributed.checkpoint.publication.follow import (
    Published,
    VersionNeededError,
    apply_publication,
    latest_version,
)
from xlstm_jax.distributed.checkpoint.publication.layout import (
    Divided,
    Joined,
    Repeated,
    Stacked,
    Unstacked,
    from_layout,
    to_layout,
)
from xlstm_jax.distributed.checkpoint.publication.publish import publish
from xlstm_jax.distributed.checkpoint.publication.reading import import_in_layout
from xlstm_jax.distributed.checkpoint.safetensors_io import export_safetensors, import_safetensors
from xlstm_jax.distributed.checkpoint.tensor_names import TRANSFORMERS, Stored

__all__ = [
    "TRANSFORMERS",
    "CheckpointError",
    "Checkpointer",
    "Divided",
    "Joined",
    "Published",
    "Repeated",
    "Stacked",
    "Stored",
    "Unstacked",
    "VersionNeededError",
    "apply_publication",
    "export_safetensors",
    "from_layout",
    "import_in_layout",
    "import_safetensors",
    "latest_version",
    "publish",
    "to_layout",
]
