"""The few type names that every file of the library shares."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

PyTree = Any
Parameter = jax.Array | nn.Partitioned
AxisNames = str | Sequence[str]
Metrics = dict[str, PyTree]
