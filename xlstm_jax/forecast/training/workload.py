"""A training that is not run: the model, optimizer and abstract batch from which a step can be built on any mesh.

def my_training(*, min_weight_size=2**18, remat=True) -> Workload: ...        the user's; nothing in it needs a device
Workload --build_step(mesh)--> step, (state, batch, rng)                      abstract, as make_train_step takes them

All of it is the user's code and may raise anything; ``in_a_line`` says what failed, and in which line of the user's.
"""

import math
import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from xlstm_jax.common_types import Model, PyTree
from xlstm_jax.distributed.data_parallel.freezing import Trainable
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.device_mesh.batch_layout import batch_layout
from xlstm_jax.distributed.device_mesh.batches import abstract_batch
from xlstm_jax.distributed.device_mesh.meshes import DeviceMeshManager
from xlstm_jax.distributed.optimizers.offload import NO_OFFLOAD, Offload
from xlstm_jax.distributed.plan.init_errors import (
    InitError,
    any_cure,
    described_inputs,
    is_the_librarys,
    known_cure,
    why_not,
)
from xlstm_jax.distributed.training.loss import LossFn
from xlstm_jax.distributed.training.state import abstract_train_state
from xlstm_jax.distributed.training.step import TrainStep, make_train_step
from xlstm_jax.wording import one_line

LIBRARY = str(Path(__file__).parents[2]) + os.sep
INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
OWN = (ValueError, TypeError, ImportError)  # what this library raises, beside OSError and types of its own
NOT_THE_USERS = ("<", LIBRARY, *INSTALLED)


@dataclass(frozen=True)
class Workload:
    """The parts of a training, without devices.

    Attributes:
      model: a Linen module, its large parts wrapped by ``shard_module_params``.
      tx: the optimizer.
      batch: arrays or ``ShapeDtypeStruct`` with global shapes [b, ...].
      loss_fn: as for ``make_train_step``.
      inputs: what ``model.init`` takes; by default the batch itself, where it is one array. Give it where the loss
        calls the model on something else, as on tokens [b, t] of a batch [b, t + 1].
      init_kwargs: what ``model.init`` takes by keyword, as ``{"train": False}``.
      weighted: as for ``make_train_step``.
      offload: as for ``create_train_state``.
      num_tokens: in the batch of all devices, where its shapes do not say it; see ``tokens``.
      trainable, frozen_dtype: as for ``create_train_state``.
      batch_spec: as for ``make_train_step``; by default rows are split over all axes of the mesh.
      layout: as for ``make_train_step``.

    >>> def loss_fn(params, apply_fn, batch, rng):
    ...     return jnp.mean(apply_fn({"params": params}, batch) ** 2)
    >>> training = Workload(nn.Dense(512), optax.sgd(0.1), jax.ShapeDtypeStruct((64, 512), jnp.float32), loss_fn)
    >>> step, (state, batch, rng) = training.build_step({"dp": 16, "fsdp": 4})  # needs no devices
    >>> batch.sharding.shard_shape(batch.shape)
    (1, 512)
    """

    model: Model
    tx: optax.GradientTransformation
    batch: PyTree
    loss_fn: LossFn
    inputs: tuple[Any, ...] | None = None
    weighted: bool = False
    num_tokens: int | None = None
    trainable: Trainable | None = None
    frozen_dtype: DTypeLike | None = None
    offload: Offload = NO_OFFLOAD
    batch_spec: PyTree | None = None
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    layout: str | None = None

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

    @contextmanager
    def explaining_init(self) -> Iterator[None]:
        """Says of an error of ``model.init`` how the workload is given other inputs.

        Raises:
          InitError: in place of an error that ``model.init`` raises on these inputs by itself.
        """
        try:
            yield
        except Exception as error:
            if is_the_librarys(error) and not isinstance(error, InitError):
                raise
            inputs = self.init_inputs
            raised = why_not(self.model, inputs, self.init_kwargs)
            if raised is None or is_the_librarys(raised):
                raise
            call, by_keyword = "Workload(..., inputs=({},))", "init_kwargs={'train': False}"
            cure = known_cure(self.model, inputs, self.init_kwargs, raised, call, by_keyword)
            if not cure and self.inputs is not None:  # what the user has chosen: the mistake may be the model's
                raise (error.__cause__ if isinstance(error, InitError) and error.__cause__ else error) from None
            what = "the batch, as inputs= is not given" if self.inputs is None else "inputs="
            raise InitError(
                f"{type(self.model).__name__}.init fails on {described_inputs(inputs)}, {what}: "
                f"{described(raised).rstrip('.')}. "
                f"{cure or any_cure(call, by_keyword)}"
            ) from error

    @property
    def freezing(self) -> dict[str, Any]:
        """The arguments by which parameters are frozen, of ``create_train_state`` and of ``plan_sharding``."""
        return {"trainable": self.trainable, "frozen_dtype": self.frozen_dtype}

    @property
    def tokens(self) -> int:
        """Tokens in the batch of all devices: ``num_tokens``, where it is given, else what the shapes say.

        A leaf [b, t, ...] of integers holds b * t tokens; of several such leaves the one with the most counts. So a
        batch of t + 1 columns, from which inputs and next tokens are cut, counts t + 1 a row, and pixels as uint8 count
        as tokens: pass ``num_tokens`` to say otherwise. A batch without such a leaf is counted in rows.
        """
        if self.num_tokens is not None:
            return self.num_tokens
        arrays = [leaf for _, leaf in leaves_with_path(self.batch) if np.ndim(leaf)]
        texts = [leaf for leaf in arrays if np.ndim(leaf) >= 2 and np.issubdtype(leaf.dtype, np.integer)]
        counts = [math.prod(np.shape(leaf)[:2]) for leaf in texts] or [np.shape(leaf)[0] for leaf in arrays]
        return max(counts, default=0)

    def build_step(
        self, mesh: Mapping[str, int] | Mesh, num_minibatches: int = 1
    ) -> tuple[TrainStep, tuple[PyTree, ...]]:
        """The training step of ``make_train_step`` and its abstract arguments.

        Args:
          mesh: axes and sizes of a mesh without devices, outermost first, or a mesh of devices at hand. The batch is
            split over all its axes, or as ``batch_spec`` says.
          num_minibatches: see ``make_train_step``.
        Raises:
          ValueError: the axes do not divide the batch, or an axis that a wrapper or ``batch_spec`` names is missing.
        """
        made = mesh if isinstance(mesh, Mesh) else DeviceMeshManager.create_abstract_mesh(mesh)
        layout = batch_layout(made, None if self.batch_spec is not None else made.axis_names, self.batch_spec)
        split: dict[str, Any] = {"batch_spec": layout.spec}
        # Nothing here has values: a key by its type, a state by its shapes.
        rng = jax.eval_shape(lambda: jax.random.key(0))
        # What stays whole is in the plan and the forecast: no warning is needed here.
        where: dict[str, Any] = {"batch_axes": layout.axes, "whole_ok": True, "offload": self.offload, **self.freezing}
        with self.explaining_init():
            state = abstract_train_state(self.model, self.tx, made, rng, *self.init_inputs, **where, **self.init_kwargs)
        step = make_train_step(
            self.loss_fn,
            made,
            num_minibatches=num_minibatches,
            weighted=self.weighted,
            layout=self.layout,
            whole_ok=True,
            **split,
        )
        return step, (state, abstract_batch(self.batch, made, **split), rng)


def in_a_line(error: BaseException) -> str:
    """An error as one line: the library's own as it is, any other as it is ``described``."""
    return one_line(error) if is_own(error) else described(error)


def is_own(error: BaseException) -> bool:
    """Whether this library raised it, or the operating system below this library; not the user's code, nor JAX."""
    ours = type(error) in OWN or type(error).__module__.startswith("xlstm_jax.")
    if not str(error) or not (ours or isinstance(error, OSError)):
        return False
    # The innermost frame raised it.
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if not frames or frames[-1].startswith(LIBRARY):
        return True
    return isinstance(error, OSError) and all(name.startswith(NOT_THE_USERS) for name in frames)


def described(error: BaseException) -> str:
    """An error and the user's line that it came through last: ``KeyError: 'x' (train.py, line 12)``."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_THE_USERS)]
    line = f" ({os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    text = one_line(error).rstrip(".")
    return f"{type(error).__name__}{': ' if text else ''}{text}{line}"
