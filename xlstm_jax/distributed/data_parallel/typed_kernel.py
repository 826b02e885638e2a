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

from xlstm_jax.distributed.data_parallel.trees import split_arrays
from xlstm_jax.distributed.data_parallel.wire.collectives import is_bound, to_varying, varying_axes
from xlstm_jax.equations import COLLECTIVES, all_equations, named_axes
from xlstm_jax.private_names import batching, core, mlir, types_are_checked
from xlstm_jax.wording import one_line

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
      fn: takes arrays, trees of arrays, and anything else, which is passed on as it is; returns a tree of arrays.
        Arrays that it closes over count as arguments; they must be the same on all devices, as masks are.
    Returns:
      A function with the same arguments and results.
    Raises:
      ValueError: at the call: ``fn`` asks for the device's index or communicates, so its result varies over axes that
        its arguments do not show; or it closes over an array that varies. At lowering: the kernel is for other devices.
      NotImplementedError: of JAX: a derivative of the gradient, or one in forward mode.
    """

    name = getattr(getattr(fn, "func", fn), "__name__", repr(fn))  # of a functools.partial that of its function

    @functools.wraps(fn)
    def typed(*args: P.args, **kwargs: P.kwargs) -> R:
        if not types_are_checked.value:  # no types are wanted: check_vma=False, or no shard_map
            return fn(*args, **kwargs)
        arrays, put_back = split_arrays((args, kwargs))

        def of_arrays(*values: jax.Array) -> Any:
            again, by_name = put_back(dict(zip(arrays, values, strict=True)))
            return cast(Callable[..., Any], fn)(*again, **by_name)

        # What the kernel closes over (a mask that was made beside it) is an operand, too: it may be traced itself, and
        # below the kernel is traced again, also where that trace has ended (in the backward pass of a scan).
        jaxpr, consts, structure = _traced(of_arrays, *arrays.values())
        _check_alone(jaxpr, consts, name)
        operands = [*consts, *arrays.values()]
        axes = tuple(sorted(frozenset().union(*map(varying_axes, operands))))
        operands = [to_varying(value, axes) for value in operands]
        trained = {i: value for i, value in enumerate(operands) if jnp.issubdtype(value.dtype, jnp.inexact)}
        rest = {i: value for i, value in enumerate(operands) if i not in trained}
        dtypes = {i: value.dtype for i, value in trained.items()}

        def kernel(trained: dict[int, jax.Array], rest: dict[int, jax.Array]) -> Any:
            both = trained | rest
            return jax.tree.unflatten(structure, _run(jaxpr, *(both[i] for i in range(len(both)))))

        # The second result is the kernel's vjp function. It is a pytree of its residuals, so they leave the operation
        # as arrays, and `backward` can call it in an operation of its own.
        def forward(trained: dict[int, jax.Array], rest: dict[int, jax.Array]) -> tuple[Any, Any]:
            return _call(lambda trained, rest: jax.vjp(lambda x: kernel(x, rest), trained), (trained, rest), axes, name)

        def backward(kept: Any, cotangent: Any) -> tuple[Any, None]:
            (grads,) = _call(lambda kept, cotangent: kept(cotangent), (kept, cotangent), axes, name)
            # Some kernels return a wider gradient, which JAX takes from them and refuses further on.
            return {i: grad.astype(dtypes[i]) for i, grad in grads.items()}, None

        # By a rule of its own, since JAX cannot differentiate the opaque operation.
        one = jax.custom_vjp(lambda trained, rest: _call(kernel, (trained, rest), axes, name))
        one.defvjp(forward, backward)
        return one(trained, rest)

    return typed


def _traced(fn: Callable[..., Any], *args: Any) -> tuple[core.Jaxpr, list[Any], Any]:
    """The program of ``fn(*args)``, traced without types; what it closes over; the structure of its results."""
    with types_are_checked(False):
        closed, results = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_shape, args))
    return closed.jaxpr, closed.consts, jax.tree.structure(results)


def _check_alone(jaxpr: core.Jaxpr, consts: list[Any], name: str) -> None:
    """That the types of the results follow from those of the arguments."""
    # A kernel may have axes of its own, as those of the cores that share its work.
    asking = [eqn for eqn in all_equations(jaxpr.eqns) if eqn.primitive.name in _OF_THE_MESH]
    if uses := {eqn.primitive.name for eqn in asking if any(map(is_bound, named_axes(eqn)))}:
        raise ValueError(
            f"typed_kernel: {name} contains {', '.join(sorted(uses))}. A kernel's result must be a function of its "
            "arguments alone, as its type is made of theirs. Pass the device's index as an argument, and communicate "
            "before or after the kernel."
        )
    # It would keep its type in a program without types, and JAX compares the two in the gradient.
    if closed := frozenset().union(*map(varying_axes, consts)):
        raise ValueError(
            f"typed_kernel: {name} closes over an array that varies over {sorted(closed)}. Pass this array as an "
            "argument."
        )


def _call(fn: Callable[..., Any], args: Any, axes: tuple[str, ...], name: str) -> Any:
    """``fn(*args)`` as one operation, whose results vary over ``axes``."""
    jaxpr, consts, structure = _traced(fn, *args)
    outs = _KERNEL.bind(*consts, *jax.tree.leaves(args), jaxpr=jaxpr, name=name)
    return jax.tree.unflatten(structure, to_varying(outs, axes))


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


def _lowered(ctx: mlir.LoweringRuleContext, *operands: Any, jaxpr: core.Jaxpr, name: str) -> Any:
    # The operands have types here, and the program was traced without: its own types fit its operations.
    untyped = ctx.replace(avals_in=[var.aval for var in (*jaxpr.constvars, *jaxpr.invars)])
    try:
        with types_are_checked(False):
            results = mlir.lower_fun(functools.partial(_run, jaxpr), multiple_results=True)(untyped, *operands)
    except (ValueError, NotImplementedError) as error:
        platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
        raise ValueError(
            f"typed_kernel: {name} cannot be lowered for {platforms}: {one_line(error)} If this kernel is for other "
            "devices, choose by platform, as attention(q, k, v) of docs/kernels.md does, or run it interpreted "
            "(interpret=True of pallas_call)."
        ) from error
    if untyped.tokens_out is not None:  # of an interpreted kernel, which calls back to the host
        ctx.set_tokens_out(untyped.tokens_out)
    return results


def _batched(operands: Any, dims: Any, *, jaxpr: core.Jaxpr, name: str) -> Any:
    # The program is traced anew with the batch in it, and stays one operation.
    over = jax.vmap(functools.partial(_run, jaxpr), in_axes=tuple(dims))
    with types_are_checked(False):
        closed = jax.make_jaxpr(over)(*map(_shape, operands))
    outs = _KERNEL.bind(*closed.consts, *operands, jaxpr=closed.jaxpr, name=name)
    return outs, [0] * len(outs)


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))


_KERNEL.def_impl(lambda *operands, jaxpr, name: _run(jaxpr, *operands))
_KERNEL.def_effectful_abstract_eval(lambda *_, jaxpr, name: ([var.aval for var in jaxpr.outvars], jaxpr.effects))
mlir.register_lowering(_KERNEL, _lowered)
batching.primitive_batchers[_KERNEL] = _batched
