"""Cures for JAX's errors about types and forward derivatives in a user's function."""

import re
import traceback
from typing import Any

import jax

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.formatting import listed, one_line
from xlstm_jax.introspection import MIXED_AXES, locals_of_traceback

# Fragments of JAX's error texts.
NO_TYPE = " requires varying manual axes to match"
KERNEL = "`manual_axis_type` on `jax.ShapeDtypeStruct` must not be `None`"
CONSTRAINT = "passed to with_sharding_constraint can only refer to Auto axes"
FORWARD, FORWARD_RULE = "can't apply forward-mode autodiff (jvp) to a custom_vjp", "rule for 'custom_lin'"
BRANCHES, TYPES = "branches must have equal output types", "manual axis types do not match"
CARRY, VARYING = "carry input and carry output must have equal types, but they differ", "to='varying'"


def raise_with_cure(error: Exception) -> None:
    """Raises an error with a cure in place of ``error``, which JAX raised in user code; returns if no cure is known.

    ``error`` is the cause of the raised error.
    """
    if cure := _with_cure(error):
        raise cure from error


def _with_cure(error: Exception) -> Exception | None:
    """Returns a new error, whose text names a cure, for JAX's ``error``; None if no cure is known.

    JAX's error is recognised by its text.
    """
    text = one_line(error)
    if (isinstance(error, NotImplementedError) and FORWARD_RULE in text) or FORWARD in text:
        return TypeError(
            "jax.jvp, jax.linearize or jax.jacfwd differentiates forward through the gather of a parameter, which has "
            "a backward rule only. Gather first, weights = gather_params(params, axes), and differentiate with respect "
            "to weights; derivatives with respect to inputs need no change."
        )
    if CARRY in text and VARYING in text:
        types = text.partition(CARRY)[2].partition(", so")[0].strip(" :*,")
        if _seeks_constants(error):
            return TypeError(
                f"a scan or a loop in a layer of an nn.scan has a carry without its type: {types}. Before its loop an "
                "nn.scan traces the layer once, to find constants, and its inputs lose their types in this trace. Pass "
                "check_vma=False to the step, which returns the same gradients, or check_constancy_invariants=False to "
                "the nn.scan around the scan or loop (nn.remat_scan has no such option)."
            )
        return TypeError(
            "a scan or a loop of this model begins with a carry that is equal on all devices by its type (zeros, as an "
            f"LSTM's), and returns a varying one: {types}. Pass check_vma=False, which returns the same gradients, or "
            "the carry pcast(carry, axes, to='varying') of jax.lax, with all axes of the batch."
        )
    if BRANCHES in text and TYPES in text:
        return TypeError(
            "a branch of this model (lax.cond or switch) returns what is equal on all devices by its type (a constant, "
            "a collection), and another returns what varies: "
            f"{text.partition(' The output')[2].partition(' This might')[0].strip(' ,.')}. Pass check_vma=False, which "
            "returns the same gradients, or return pcast(result, axes, to='varying') of jax.lax from both branches."
        )
    if CONSTRAINT in text:
        return ValueError(
            "the model constrains the sharding of an activation (jax.lax.with_sharding_constraint), and within a step "
            f"each device holds its own rows: {text.partition(' Got ')[2].partition(' and mesh')[0]}. Leave the "
            "constraint out where the axes are manual: if not jax.sharding.get_abstract_mesh().manual_axes."
        )
    if KERNEL in text:
        return ValueError(
            f"{_module_of(error)} calls a Pallas kernel, whose result has no type under check_vma=True. Wrap the "
            "function that runs the kernel: typed_kernel(kernel)(...), from xlstm_jax.distributed. Values and "
            "gradients are the same."
        )
    if jax.config.jax_auto_pcast and (match := MIXED_AXES.search(text)):
        return _of_mixed_axes(*match.groups())
    if _is_of_vmapped_axis(error):
        return _of_vmapped_axis("a collective", "an axis that the mesh does not have")
    if not isinstance(error, ValueError) or not (NO_TYPE in text or MIXED_AXES.search(text)):
        return None
    primitive = MIXED_AXES.sub(r"\1", text).partition(NO_TYPE)[0].removeprefix("Primitive ")
    if not jax.config.jax_auto_pcast:
        return ValueError(
            f"the primitive {primitive!r} mixes types, and jax_auto_pcast is False: under check_vma=True nearly every "
            "model needs JAX's casts of equal values to varying. Call jax.config.update('jax_auto_pcast', True), or "
            "pass check_vma=False (to make_train_step, or to your shard_map)."
        )
    cure = (
        "Pass check_vma=False (to make_train_step, or to your shard_map): unless the model reduces over a further "
        "axis, the gradients are the same."
    )
    if primitive == "polynomial":
        return ValueError(
            f"JAX {jax.__version__} has no gradient of this loss under check_vma=True: in float32 its derivatives of "
            f"the exact gelu, erf and erfc mix types in the primitive {primitive!r}. {cure} Or take "
            "gelu(approximate=True), or bfloat16 for that function."
        )
    return ValueError(
        f"one of JAX's own rules (of a derivative, say, or of a branch under jax.vmap) mixes types in the primitive "
        f"{primitive!r}, on JAX {jax.__version__} under check_vma=True. {cure}"
    )


def _seeks_constants(error: Exception) -> bool:
    """Returns whether ``error`` was raised while an ``nn.scan`` of Flax traced its layer to find constants.

    The trace is recognised by the frames of the traceback: an argument of Flax's function says so.
    """
    return any(variables.get("init_mode") is True for variables in locals_of_traceback(error, "body_fn"))


def _is_of_vmapped_axis(error: Exception) -> bool:
    """Returns whether ``error`` is JAX's assertion about a collective over an axis of ``jax.vmap``, not of the mesh.

    The assertion has no text: it is recognised by the JAX function that raised it.
    """
    # The assertion has no text. JAX raises the assertion in a cast of the operand to varying over a non-mesh axis.
    return isinstance(error, AssertionError) and traceback.extract_tb(error.__traceback__)[-1].name == "pvary"


def _of_vmapped_axis(collective: str, axes: str) -> ValueError:
    return ValueError(
        f"{collective} reduces over {axes}, as jax.vmap or nn.vmap(axis_name=...) names it, and under check_vma=True "
        "JAX has no collective over such an axis inside shard_map. Pass check_vma=False (to make_train_step and "
        "make_eval_step, or to your shard_map); values are those of one device if the collective also names the axes "
        "of the batch."
    )


def _of_mixed_axes(collective: str, operand: str, axes: str) -> ValueError:
    """Returns the ``ValueError``, with a cure, for a reduction whose operand is equal along some of its axes by type.

    The arguments are parts of the text of JAX's error: the name of the collective, such as psum; the type of the
    operand; and the quoted names of the axes. If some axes belong to ``jax.vmap``, not to the mesh, the returned error
    is about these axes instead.
    """
    mesh = collectives.manual_axes()
    if off_mesh := [axis for axis in re.findall(r"'([^']*)'", axes) if axis not in mesh]:
        return _of_vmapped_axis(f"{collective} over ({axes})", listed(off_mesh))
    return ValueError(
        f"{collective} reduces over ({axes}), and its operand, {operand}, is equal along some of these axes by its "
        "type, which check_vma=True does not allow. Name only the axes along which the operand differs (for a "
        "BatchNorm, the axes of the batch), or pass check_vma=False."
    )


def _module_of(error: Exception) -> str:
    """Returns the innermost Linen module that ran when ``error`` was raised, as text: "module 'PATH'".

    The module is read off the frames of the traceback. For the model itself, whose path is empty, the text has the name
    of its class. Without a Linen module returns "this loss".
    """
    innermost: Any = None
    for variables in locals_of_traceback(error):
        running = variables.get("self")
        innermost = running if getattr(running, "scope", None) is not None else innermost
    return f"module '{'/'.join(innermost.path) or type(innermost).__name__}'" if innermost else "this loss"
