"""The command ``xlstm-jax``: arguments in, tables out. Nothing else in the library prints."""

from xlstm_jax.cli.command_line import main

__all__ = ["main"]
