"""The few type names that every file of the library shares."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax.core import meta

PyTree = Any
Parameter = jax.Array | meta.Partitioned[Any]
AxisNames = str | Sequence[str]
Metrics = dict[str, PyTree]
DType = np.dtype[np.generic]
Scalar = jax.Array | float


class Model(Protocol):
    """A model as a pair of functions, which is how the library uses one; every Linen module is such a pair."""

    def init(self, rng: PyTree, /, *inputs: PyTree, **kwargs: Any) -> PyTree:
        """The variables: parameters under "params", beside other collections."""

    def apply(self, variables: PyTree, /, *inputs: PyTree, **kwargs: Any) -> PyTree:
        """The outputs; with ``mutable=...``, a pair of them and the variables that have changed."""
