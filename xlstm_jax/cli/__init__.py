"""Command ``xlstm-jax``: takes arguments and prints tables. No other part of the library prints."""

from xlstm_jax.cli.command_line import main

__all__ = ["main"]
