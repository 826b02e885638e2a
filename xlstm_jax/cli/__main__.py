"""Entry point of ``python -m xlstm_jax.cli``."""

import sys

from xlstm_jax.cli.command_line import main

sys.exit(main())
