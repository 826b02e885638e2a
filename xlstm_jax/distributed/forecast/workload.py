"""A training that is not run: the model, optimizer and abstract batch from which a step can be built on any mesh.

def my_training(*, min_weight_size=2**18, remat=True) -> Workload: ...        the user's; nothing in it needs a device
Workload --build_step(mesh)--> step, (state, batch, rng)                      abstract, as make_train_step takes them
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.device_mesh import DeviceMeshManager, abstract_batch
from xlstm_jax.distributed.gradients import LossFn
from xlstm_jax.distributed.partitioning import leaves_with_path
from xlstm_jax.distributed.training import abstract_train_state, make_train_step


@dataclass(frozen=True)
class Workload:
    """What a training is made of, apart from the devices.

    Attributes:
      model: a Linen module, its large parts wrapped by ``shard_module_params``.
      tx: the optimizer.
      batch: arrays or ``ShapeDtypeStruct`` with global shapes [b, ...].
      loss_fn: as for ``make_train_step``.
      inputs: what ``model.init`` takes; by default the batch itself, where it is one array.
      weighted: as for ``make_train_step``.
    """

    model: nn.Module
    tx: optax.GradientTransformation
    batch: PyTree
    loss_fn: LossFn
    inputs: tuple[Any, ...] | None = None
    weighted: bool = False

    @property
    def init_inputs(self) -> tuple[Any, ...]:
        """What ``model.init`` takes.

        Raises:
          ValueError: the batch has several leaves and ``inputs`` is not given; names them.
        """
        if self.inputs is not None:
            return tuple(self.inputs)
        leaves = leaves_with_path(self.batch)
        if len(leaves) != 1:
            raise ValueError(
                f"the batch has the leaves {[path for path, _ in leaves]}: which of them does model.init take? Say so, "
                "as Workload(..., inputs=(batch['tokens'],))."
            )
        return (leaves[0][1],)

    @property
    def tokens(self) -> int:
        """Tokens in the batch: the product of the first two dims of the largest integer leaf, else its rows.

        A leaf [b, t] of integers holds b * t tokens; a batch without one is counted in examples.
        """
        shapes = [np.shape(leaf) for _, leaf in leaves_with_path(self.batch) if np.ndim(leaf)]
        whole = [
            np.shape(leaf)
            for _, leaf in leaves_with_path(self.batch)
            if np.ndim(leaf) == 2 and np.issubdtype(leaf.dtype, np.integer)
        ]
        return max(map(math.prod, whole), default=max((shape[0] for shape in shapes), default=0))

    def build_step(
        self, mesh: Mapping[str, int] | Mesh, num_minibatches: int = 1
    ) -> tuple[Callable[..., Any], tuple[PyTree, ...]]:
        """The training step of ``make_train_step`` and its abstract arguments.

        Args:
          mesh: axes and sizes of a mesh without devices, outermost first, or a mesh of devices at hand. The batch is
            split over all its axes.
          num_minibatches: see ``make_train_step``.
        Raises:
          ValueError: the axes do not divide the batch, or an axis that a wrapper names is missing.
        """
        mesh = mesh if isinstance(mesh, Mesh) else DeviceMeshManager.create_abstract_mesh(mesh)
        axes = mesh.axis_names
        rng = jax.eval_shape(lambda: jax.random.key(0))
        state = abstract_train_state(self.model, self.tx, mesh, rng, *self.init_inputs, batch_axes=axes)
        step = make_train_step(self.loss_fn, mesh, axes, num_minibatches=num_minibatches, weighted=self.weighted)
        return step, (state, abstract_batch(self.batch, mesh, axes), rng)
