"""A training that is not run: model, optimizer and abstract batch, from which a step can be built on any mesh.

def my_training(*, min_weight_size=2**18, remat=True) -> Workload: ...        written by the user; needs no device
Workload --build_step(mesh)--> step, (state, batch, rng)                      abstract, as for make_train_step

The user's code may raise anything; ``one_line_text`` returns the error with the line of the user's code.
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
    described_inputs,
    general_cure,
    init_failure,
    is_library_error,
    known_cure,
)
from xlstm_jax.distributed.training.loss import LossFn
from xlstm_jax.distributed.training.state import abstract_train_state
from xlstm_jax.distributed.training.step import TrainStep, make_train_step
from xlstm_jax.formatting import one_line

LIBRARY = str(Path(__file__).parents[2]) + os.sep
INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
# Raised by this library, besides OSError and types of this library. Subclasses, as JSONDecodeError, do not count.
LIBRARY_ERROR_TYPES = (ValueError, TypeError, ImportError)
PATHS_WITHOUT_USER_CODE = ("<", LIBRARY, *INSTALLED)


@dataclass(frozen=True)
class Workload:
    """Parts of a training, without devices.

    Attributes:
      model: a model whose large parts are wrapped by ``shard_module_params`` or chosen by ``shard_modules``.
      tx: the optimizer.
      batch: arrays or ``ShapeDtypeStruct`` with global shapes [b, ...].
      loss_fn: as for ``make_train_step``.
      inputs: arguments of ``model.init``; by default the batch, if it is a single array. Needed if the loss calls the
        model on something else, for example on tokens [b, t] from a batch [b, t + 1].
      init_kwargs: keyword arguments of ``model.init``, as ``{"train": False}``.
      weighted: as for ``make_train_step``.
      offload: as for ``create_train_state``.
      num_tokens: tokens in the global batch, if the shapes do not give the number; see ``tokens``.
      trainable, frozen_dtype: as for ``create_train_state``.
      batch_spec: as for ``make_train_step``; by default rows are split over every mesh axis.
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
        """Arguments of ``model.init`` after the key: ``inputs`` or, by default, the only leaf of the batch.

        Raises:
          ValueError: the batch has several leaves and ``inputs`` is not given; names the leaves.
        """
        if self.inputs is not None:
            return tuple(self.inputs)
        leaves = leaves_with_path(self.batch)
        if len(leaves) != 1:
            raise ValueError(
                f"the batch has the leaves {[path for path, _ in leaves]}: which of them does model.init take? Pass "
                "Workload(..., inputs=(batch['tokens'],))."
            )
        return (leaves[0][1],)

    @contextmanager
    def explaining_init(self) -> Iterator[None]:
        """Context for calls of ``model.init``: replaces an error that the inputs cause by an ``InitError`` with advice.

        The inputs are the cause if a trace of ``model.init`` alone fails on them, too, outside of the library's code.
        The advice says how to pass other inputs to the workload. Any other error passes unchanged; so does an error on
        given ``inputs`` for which no advice is known.

        Raises:
          InitError: as described; names the model, the inputs and the error.
        """
        try:
            yield
        except Exception as error:
            if is_library_error(error) and not isinstance(error, InitError):
                raise
            inputs = self.init_inputs
            raised = init_failure(self.model, inputs, self.init_kwargs)
            if raised is None or is_library_error(raised):
                raise
            call, by_keyword = "Workload(..., inputs=({},))", "init_kwargs={'train': False}"
            cure = known_cure(self.model, inputs, self.init_kwargs, raised, call, by_keyword)
            if not cure and self.inputs is not None:  # the user chose the inputs, so the error may be in the model
                raise (error.__cause__ if isinstance(error, InitError) and error.__cause__ else error) from None
            source = "the batch, as inputs= is not given" if self.inputs is None else "inputs="
            raise InitError(
                f"{type(self.model).__name__}.init fails on {described_inputs(inputs)}, {source}: "
                f"{described(raised).rstrip('.')}. "
                f"{cure or general_cure(call, by_keyword)}"
            ) from error

    @property
    def freezing(self) -> dict[str, Any]:
        """Keyword arguments of ``create_train_state`` and ``plan_sharding`` that freeze parameters.

        The result is {"trainable": ``trainable``, "frozen_dtype": ``frozen_dtype``}, from the fields of the workload.
        """
        return {"trainable": self.trainable, "frozen_dtype": self.frozen_dtype}

    @property
    def tokens(self) -> int:
        """Tokens in the global batch: ``num_tokens`` if given, else computed from the shapes.

        An integer leaf [b, t, ...] holds b * t tokens; the leaf with the most tokens counts. A batch of t + 1 columns,
        from which inputs and next tokens are cut, therefore counts t + 1 tokens per row, and uint8 pixels count as
        tokens: pass ``num_tokens`` for the exact number. A batch without integer leaves is counted in rows.
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
        """Returns the training step of ``make_train_step`` and its abstract arguments: (step, (state, batch, rng)).

        Args:
          mesh: axes and sizes of a mesh without devices, outermost first, or a mesh of devices at hand. The batch is
            split over every axis, or as ``batch_spec`` says.
          num_minibatches: see ``make_train_step``.
        Raises:
          ValueError: the axes do not divide the batch, or the mesh lacks an axis named by a wrapper or ``batch_spec``.
        """
        made = mesh if isinstance(mesh, Mesh) else DeviceMeshManager.create_abstract_mesh(mesh)
        layout = batch_layout(made, None if self.batch_spec is not None else made.axis_names, self.batch_spec)
        split: dict[str, Any] = {"batch_spec": layout.spec}
        # The arguments are abstract: the key has only a type, the state only shapes.
        rng = jax.eval_shape(lambda: jax.random.key(0))
        # Plan and forecast list replicated leaves, so no warning is needed here.
        where: dict[str, Any] = {
            "batch_axes": layout.axes,
            "allow_replicated": True,
            "offload": self.offload,
            **self.freezing,
        }
        with self.explaining_init():
            state = abstract_train_state(self.model, self.tx, made, rng, *self.init_inputs, **where, **self.init_kwargs)
        step = make_train_step(
            self.loss_fn,
            made,
            num_minibatches=num_minibatches,
            weighted=self.weighted,
            layout=self.layout,
            allow_replicated=True,
            **split,
        )
        return step, (state, abstract_batch(self.batch, made, **split), rng)


def one_line_text(error: BaseException) -> str:
    """Formats an error in one line: for an error of this library its text.

    For any other error the type, the text, and the innermost line of the user's code: ``KeyError: 'x' (train.py, line
    12)``.
    """
    return one_line(error) if is_raised_by_library(error) else described(error)


def is_raised_by_library(error: BaseException) -> bool:
    """Returns whether the library raised the error, or the operating system in a call of the library.

    Such errors are printed without a line of the user's code. They have a text, and either an exact type of
    ``LIBRARY_ERROR_TYPES`` or a type of the library, with the innermost frame in the library; or they are an
    ``OSError`` whose traceback has no frame of the user's code.
    """
    has_library_type = type(error) in LIBRARY_ERROR_TYPES or type(error).__module__.startswith("xlstm_jax.")
    # Without a text only the type and the line could explain the error.
    if not str(error) or not (has_library_type or isinstance(error, OSError)):
        return False
    # The innermost frame raised the error.
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if not frames or frames[-1].startswith(LIBRARY):
        return True
    return isinstance(error, OSError) and all(name.startswith(PATHS_WITHOUT_USER_CODE) for name in frames)


def described(error: BaseException) -> str:
    """Formats an error in one line, with the innermost line of the user's code: ``KeyError: 'x' (train.py, line 12)``.

    Without a line of the user's code in the traceback, the parentheses are left out.
    """
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(PATHS_WITHOUT_USER_CODE)
    ]
    line = f" ({os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    text = one_line(error).rstrip(".")
    return f"{type(error).__name__}{': ' if text else ''}{text}{line}"
