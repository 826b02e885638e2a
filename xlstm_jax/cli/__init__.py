"""Command ``xlstm-jax``: takes arguments and prints tables. The rest of the library prints nothing."""

from xlstm_jax.cli.command_line import main

__all__ = ["main"]
