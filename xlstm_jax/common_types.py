"""Type names shared by the library's files."""

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
    """Protocol of a model: a pair of functions ``init`` and ``apply``, as every Linen module has."""

    def init(self, rng: PyTree, /, *inputs: PyTree, **kwargs: Any) -> PyTree:
        """Returns newly initialised variables, by name of the collection: parameters under "params", and others.

        ``rng`` is a key or a dict of keys, and ``inputs`` are example inputs.
        """

    def apply(self, variables: PyTree, /, *inputs: PyTree, **kwargs: Any) -> PyTree:
        """Returns the outputs; with ``mutable=...``, a pair of outputs and changed variables."""
