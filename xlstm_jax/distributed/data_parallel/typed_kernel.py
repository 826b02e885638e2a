"""Makes kernels without types usable in a step with types (``check_vma=True``).

Under ``check_vma=True`` each value has a type: the mesh axes over which it varies. JAX computes the types of results,
except of a Pallas kernel's results: the kernel's author has to write these, and the authors of common kernels do not.
So a kernel is traced here as if there were no types, and its program becomes one operation of the step:

    typed_kernel(fn)(*args)
      forward     cast each array to vary over the axes of all  ->  one operation: fn, traced without types  ->  cast
      backward    cotangents                                    ->  one operation: fn's own gradient         ->  cast

The first cast is JAX's own. Its transpose sums the gradient of an argument over the axes over which only other
arguments vary, so a kernel may mix activations with a weight that all devices hold. The operation is opaque to the
transformations around it (remat, scan, jit), which would otherwise compute the types of the kernel's inner operations.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from xlstm_jax.distributed.data_parallel.equations import COLLECTIVES, all_equations
from xlstm_jax.distributed.data_parallel.remat import split_arrays
from xlstm_jax.distributed.data_parallel.wire.collectives import to_varying, varying_axes
from xlstm_jax.private_names import batching, core, mlir, types_are_checked

P = ParamSpec("P")
R = TypeVar("R")

# Operations that make a kernel's result differ between devices although its arguments do not, or that communicate.
_OF_THE_MESH = {"axis_index", *COLLECTIVES}


def typed_kernel(fn: Callable[P, R]) -> Callable[P, R]:
    """A kernel (Pallas, cuDNN, any function without types of its own) for use where ``check_vma=True``.

    >>> from jax.experimental import pallas as pl
    >>> def kernel(x):
    ...     def double(x, out):
    ...         out[...] = 2 * x[...]
    ...     return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    >>> over_devices = lambda fn: jax.shard_map(fn, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))
    >>> over_devices(typed_kernel(kernel))(jnp.arange(8.0))
    Array([ 0.,  2.,  4.,  6.,  8., 10., 12., 14.], dtype=float32)

    Results and gradients vary over the axes over which any argument varies. Without types (``check_vma=False``, or
    outside of ``shard_map``) it is ``fn`` itself. It works under ``jax.grad`` (by the kernel's own gradient),
    ``jax.vmap``, ``jax.lax.scan`` and ``jax.checkpoint``.

    Args:
      fn: takes arrays, trees of arrays, and anything else, which is passed on as it is; returns a tree of arrays. The
        result must depend on the arguments alone: arrays that ``fn`` closes over get no gradient.
    Returns:
      A function with the same arguments and results.
    Raises:
      ValueError: at the call: ``fn`` asks for the device's index or communicates, so its result varies over axes that
        its arguments do not show.
      NotImplementedError: of JAX: a derivative of the gradient, or one in forward mode.
    """

    name = getattr(fn, "__name__", repr(fn))

    @functools.wraps(fn)
    def typed(*args: P.args, **kwargs: P.kwargs) -> R:
        arrays, put_back = split_arrays((args, kwargs))
        axes = tuple(sorted(frozenset().union(*map(varying_axes, arrays.values()))))
        if not types_are_checked.value:  # no types are wanted: check_vma=False, or no shard_map
            return fn(*args, **kwargs)
        arrays = {i: to_varying(value, axes) for i, value in arrays.items()}
        trained = {i: value for i, value in arrays.items() if jnp.issubdtype(value.dtype, jnp.inexact)}
        rest = {i: value for i, value in arrays.items() if i not in trained}

        def of_arrays(trained: dict[int, jax.Array], rest: dict[int, jax.Array]) -> Any:
            again, by_name = put_back(trained | rest)
            return cast(Callable[..., Any], fn)(*again, **by_name)

        # The second result is the kernel's vjp function. It is a pytree of its residuals, so they leave the operation
        # as arrays, and `backward` can call it in an operation of its own.
        def forward(trained: dict[int, jax.Array], rest: dict[int, jax.Array]) -> tuple[Any, Any]:
            return _call(
                lambda trained, rest: jax.vjp(lambda x: of_arrays(x, rest), trained), (trained, rest), axes, name
            )

        def backward(kept: Any, cotangent: Any) -> tuple[Any, None]:
            (grads,) = _call(lambda kept, cotangent: kept(cotangent), (kept, cotangent), axes, name)
            return grads, None

        # By a rule of its own, since JAX cannot differentiate the opaque operation.
        one = jax.custom_vjp(lambda trained, rest: _call(of_arrays, (trained, rest), axes, name))
        one.defvjp(forward, backward)
        return one(trained, rest)

    return typed


def _call(fn: Callable[..., Any], args: Any, axes: tuple[str, ...], name: str) -> Any:
    """``fn(*args)``, traced without types into one operation; its results vary over ``axes``."""
    leaves, treedef = jax.tree.flatten(args)
    found = []

    def flat(*leaves: Any) -> list[Any]:
        values, structure = jax.tree.flatten(fn(*jax.tree.unflatten(treedef, leaves)))
        found.append(structure)
        return values

    with types_are_checked(False):
        jaxpr = jax.make_jaxpr(flat)(*map(_shape, leaves))
    if uses := _OF_THE_MESH & {eqn.primitive.name for eqn in all_equations(jaxpr.eqns)}:
        raise ValueError(
            f"typed_kernel: {name} contains {', '.join(sorted(uses))}. A kernel's result must be a function of its "
            "arguments alone, as its type is made of theirs. Pass the device's index as an argument, and communicate "
            "before or after the kernel."
        )
    # What the kernel closes over (a mask that was made beside it) is an operand too: it may be traced itself.
    if wider := frozenset().union(*map(varying_axes, jaxpr.consts)) - set(axes):
        raise ValueError(
            f"typed_kernel: {name} closes over an array that varies over {sorted(wider)}, its arguments do not. Pass "
            "this array as an argument."
        )
    outs = _KERNEL.bind(*jaxpr.consts, *leaves, jaxpr=jaxpr.jaxpr)
    return jax.tree.unflatten(found[-1], to_varying(outs, axes))


class _Kernel(core.Primitive):
    """One operation that runs a jaxpr. Its operands are the arrays that the jaxpr closes over, then the arguments."""

    multiple_results = True

    def is_high(self, *_: Any, **__: Any) -> bool:
        """Never: the operation is lowered as it is, also if its program has references."""
        return False


_KERNEL = _Kernel("typed_kernel")


def _run(jaxpr: core.Jaxpr, *operands: Any) -> list[Any]:
    count = len(jaxpr.constvars)
    return eval_jaxpr(jaxpr, operands[:count], *operands[count:])


def _lowered(ctx: mlir.LoweringRuleContext, *operands: Any, jaxpr: core.Jaxpr) -> Any:
    # The operands have types here, and the program was traced without: its own types fit its operations.
    untyped = ctx.replace(avals_in=[var.aval for var in (*jaxpr.constvars, *jaxpr.invars)])
    with types_are_checked(False):
        results = mlir.lower_fun(functools.partial(_run, jaxpr), multiple_results=True)(untyped, *operands)
    if untyped.tokens_out is not None:  # of an interpreted kernel, which calls back to the host
        ctx.set_tokens_out(untyped.tokens_out)
    return results


def _batched(operands: Any, dims: Any, *, jaxpr: core.Jaxpr) -> Any:
    over = jax.vmap(functools.partial(_run, jaxpr), in_axes=tuple(dims))
    with types_are_checked(False):
        closed = jax.make_jaxpr(over)(*map(_shape, operands))
    outs = _KERNEL.bind(*closed.consts, *operands, jaxpr=closed.jaxpr)
    return outs, [0] * len(outs)


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))


_KERNEL.def_impl(lambda *operands, jaxpr: _run(jaxpr, *operands))
_KERNEL.def_effectful_abstract_eval(lambda *_, jaxpr: ([var.aval for var in jaxpr.outvars], jaxpr.effects))
mlir.register_lowering(_KERNEL, _lowered)
batching.primitive_batchers[_KERNEL] = _batched
