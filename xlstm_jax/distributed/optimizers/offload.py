"""``Offload``: keeps the optimizer's state in host memory; each update copies the state to the device and back.

  create_train_state(..., offload=Offload())      moments in "pinned_host", split over devices as without offload
  make_train_step                                 finds leaves on the host by the types of the state; see ``streaming``

A leaf of the state is on the host if the leaf is at least as large as its sharded parameter. Counts, factored moments
and the moments of replicated parameters are small and stay on the device.
"""

from dataclasses import dataclass

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.optimizers.sharded_optimizer import Placement, ShardedOptimizer, is_state_box, owner_of_state
from xlstm_jax.program_names import HOST_MEMORY


@dataclass(frozen=True)
class Offload(Placement):
    """Parts of a training state to keep in host memory.

    Attributes:
      optimizer_state: the part of the optimizer's state that is split like the parameters.
      params: must be False. JAX would put the gradients of parameters on the host, too, where nothing can be computed
        with them; and copying all parameters in at the start of a step needs as much memory as without offload.

    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> where = {"batch_axes": ("dp", "fsdp"), "offload": Offload()}
    >>> state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, **where)
    >>> state.opt_state[0].mu["kernel"].sharding.memory_kind, state.opt_state[0].mu["bias"].sharding.memory_kind
    ('pinned_host', 'device')
    """

    optimizer_state: bool = True
    params: bool = False

    def __post_init__(self) -> None:
        if self.params:
            raise ValueError(
                "Offload(params=True): parameters stay on the device, as every step reads all of them. Leave "
                "params=False, and save memory by more devices along the axes that split the parameters, by "
                "remat_policy(..., offload=[BLOCK_INPUT]) for activations, or by freeze_params."
            )

    def wrap(self, optimizer: ShardedOptimizer, params: PyTree, mesh: Mesh | AbstractMesh) -> ShardedOptimizer:
        del mesh
        if not self.optimizer_state:
            return optimizer
        return optimizer._replace(
            shardings=lambda opt_state: on_host(optimizer.shardings(opt_state), opt_state, params)
        )


NO_OFFLOAD = Offload(optimizer_state=False)


def on_host(shardings: PyTree, opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the ``shardings`` of an optimizer's state, with offloaded leaves in host memory.

    Offloaded are leaves at least as large as their parameter, if the parameter is split; and leaves in a ``StateBox``,
    a box that an optax transform has put around a leaf.

    Args:
      shardings: from ``optimizer_state_shardings``.
      opt_state: arrays or ``ShapeDtypeStruct``.
      params: boxed parameters, arrays or abstract.
    """
    by_path = dict(trees.sharded_leaves(params))

    def placed(path: str, leaf: PyTree, sharding: NamedSharding) -> NamedSharding:
        owner = owner_of_state(path, by_path)
        # A transform with a custom layout of its state has no path of a parameter to compare the leaf with.
        is_large = is_state_box(leaf) or (
            owner is not None and owner.axes and np.size(trees.stored_values(leaf)) >= np.size(owner.value)
        )
        return sharding.with_memory_kind(HOST_MEMORY) if is_large else sharding

    return trees.map_leaves_with_path(placed, opt_state, shardings)
