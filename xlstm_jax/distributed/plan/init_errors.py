"""Errors of ``model.init`` on the inputs of a plan: explanations, and inputs on which ``model.init`` succeeds.

The usual cause is a batch of tokens [b, t + 1], from which the loss function cuts inputs and next tokens [b, t]: a
model with learned positions for t tokens cannot be called on the uncut batch.
"""

import os
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xlstm_jax.accelerators import absent_device
from xlstm_jax.common_types import Model, PyTree
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.formatting import joined, one_line

LIBRARY = str(Path(__file__).parents[2]) + os.sep
MISSING = re.compile(r"missing \d+ required .*arguments?: (.*)$")


class InitError(ValueError):
    """Error of ``model.init`` on the inputs of ``plan_sharding``; the message advises other inputs."""


def init_error(model: Model, inputs: Sequence[PyTree], kwargs: Mapping[str, Any], error: Exception) -> InitError:
    """Returns the error to raise in place of ``error``, which ``model.init(rng, *inputs, **kwargs)`` raised in a plan.

    The message has the shapes of the inputs, the type and text of ``error``, and advice on other inputs.
    """
    call = "plan_sharding(model, axis_sizes, {})"
    name = getattr(type(model), "__name__", "the model")
    cure = known_cure(model, inputs, kwargs, error, call, "train=False") or general_cure(call, "train=False")
    return InitError(
        f"{name}.init fails on the inputs of the plan, {described_inputs(inputs)}: {type(error).__name__}: "
        f"{one_line(error).rstrip('.')}. {cure}"
    )


def known_cure(
    model: Model,
    inputs: Sequence[PyTree],
    kwargs: Mapping[str, Any],
    error: Exception,
    call: str,
    by_keyword: str,
) -> str:
    """Returns a sentence with the inputs to pass instead, if the cause of ``error`` is known; else "".

    Known causes: missing arguments, and a single array of tokens [b, t + 1] in place of [b, t]; for the latter
    ``model.init`` is traced on the shorter array. After "" the mistake may be in the model.

    Args:
      model, inputs, kwargs: the failed call was ``model.init(rng, *inputs, **kwargs)``.
      error: the error of this call.
      call: the user's call as text, with a placeholder ``{}`` for the inputs: "plan_sharding(model, axis_sizes, {})".
      by_keyword: an example of an argument by keyword: "train=False".
    """
    if missing := MISSING.search(one_line(error)):
        names = missing.group(1)
        return (
            f"Pass {names} too: after the inputs, {call.format('x, y')}, or, if not an array, by keyword: {by_keyword}."
        )
    fewer = without_last_token(inputs)
    if fewer is not None and init_failure(model, fewer, kwargs) is None:
        shape, dtype = fewer[0].shape, fewer[0].dtype
        return (
            f"It takes {described_inputs(fewer)}, as a loss does that cuts inputs and next tokens from each row: pass "
            f"{call.format(f'jax.ShapeDtypeStruct({shape}, jnp.{dtype})')}."
        )
    return ""


def general_cure(call: str, by_keyword: str) -> str:
    """Returns a sentence with general advice on inputs of ``model.init``, for an error whose cause is unknown.

    Args:
      call: the user's call as text, with a placeholder ``{}`` for the inputs: "plan_sharding(model, axis_sizes, {})".
      by_keyword: an example of an argument by keyword: "train=False".
    """
    return (
        "Pass the arguments with which the loss function calls the model; shapes suffice: "
        f"{call.format('jax.ShapeDtypeStruct(shape, dtype)')}; an argument that is no array by keyword, {by_keyword}."
    )


def init_failure(model: Model, inputs: Sequence[PyTree], kwargs: Mapping[str, Any]) -> Exception | None:
    """Traces ``model.init(key, *inputs, **kwargs)`` for shapes; returns the exception raised, or None."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        with absent_device():
            jax.eval_shape(lambda key, inputs: model.init(key, *inputs, **kwargs), key, tuple(inputs))
    except Exception as error:  # the user's code may raise anything
        return error
    return None


def is_library_error(error: Exception) -> bool:
    """Returns whether code of this library raised the error (the innermost frame), not code of the user, JAX or Flax.

    False for an error about a missing argument, which a call in a wrapper of this library may raise.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # A call without a required argument fails in the line of the call, which may be in a wrapper of this library.
    called_wrongly = isinstance(error, TypeError) and MISSING.search(one_line(error))
    return bool(frames) and frames[-1].filename.startswith(LIBRARY) and not called_wrongly


def without_last_token(inputs: Sequence[PyTree]) -> tuple[jax.ShapeDtypeStruct, ...] | None:
    """Returns the inputs with a token less, if they are a single integer array [b, t + 1] with t > 0; else None.

    The result is a tuple of a ``ShapeDtypeStruct`` [b, t].
    """
    leaves = leaves_with_path(tuple(inputs))
    if len(inputs) != 1 or len(leaves) != 1:
        return None
    shape, dtype = np.shape(leaves[0][1]), np.dtype(jax.dtypes.canonicalize_dtype(leaves[0][1].dtype))
    if len(shape) != 2 or shape[1] < 2 or not np.issubdtype(dtype, np.integer):
        return None
    return (jax.ShapeDtypeStruct((shape[0], shape[1] - 1), dtype),)


def described_inputs(inputs: Sequence[PyTree]) -> str:
    """Returns dtypes and shapes of the inputs' arrays as text, such as ``int32[8, 128]``, or "no arrays".

    Several arrays are listed in tree order; a leaf that is not an array appears as its ``repr``.
    """
    leaves = [leaf for _, leaf in leaves_with_path(tuple(inputs))]
    shown = [f"{x.dtype}{list(np.shape(x))}" if hasattr(x, "dtype") else repr(x) for x in leaves]
    return joined(shown) if shown else "no arrays"
