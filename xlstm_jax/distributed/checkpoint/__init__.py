"""Checkpoints that outlive the mesh they were written on, and are read only if they are what was written."""

from xlstm_jax.distributed.checkpoint.checkpointer import Checkpointer
from xlstm_jax.distributed.checkpoint.errors import CheckpointError
from xlstm_jax.distributed.checkpoint.safetensors_io import export_safetensors, import_safetensors
from xlstm_jax.distributed.checkpoint.tensor_names import TRANSFORMERS, Stored

__all__ = [
    "TRANSFORMERS",
    "CheckpointError",
    "Checkpointer",
    "Stored",
    "export_safetensors",
    "import_safetensors",
]
