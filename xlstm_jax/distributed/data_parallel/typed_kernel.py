"""Makes kernels without types usable in a step with types (``check_vma=True``).

Under ``check_vma=True`` each value has a type, the mesh axes along which the value varies. JAX computes the types of
results, except for Pallas kernels: the kernel's author has to declare these types, and authors of common kernels do
not. So a kernel is traced here without types, and its program becomes a single operation of the step:

    typed_kernel(fn)(*args)
      forward     cast each array to vary over the union of axes  ->  one operation: fn, traced without types  ->  cast
      backward    cotangents                                      ->  one operation: the gradient of fn        ->  cast

The first cast is JAX's. The transpose of this cast sums the gradient of an argument over the axes along which only
other arguments vary, so a kernel may mix activations with a replicated weight. The operation is opaque to the
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
from xlstm_jax.formatting import one_line
from xlstm_jax.private_names import batching, core, mlir, types_are_checked

P = ParamSpec("P")
R = TypeVar("R")

# Operations that make a kernel's result differ between devices although its arguments are equal, or that communicate.
_OF_THE_MESH = {"axis_index", *COLLECTIVES}


def typed_kernel(fn: Callable[P, R]) -> Callable[P, R]:
    """Makes a kernel (Pallas, cuDNN, any function without types) usable where ``check_vma=True``.

    >>> from jax.experimental import pallas as pl
    >>> def kernel(x):
    ...     def double(x, out):
    ...         out[...] = 2 * x[...]
    ...     return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    >>> over_devices = lambda fn: jax.shard_map(fn, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))
    >>> over_devices(typed_kernel(kernel))(jnp.arange(8.0))
    Array([ 0.,  2.,  4.,  6.,  8., 10., 12., 14.], dtype=float32)

    Results and gradients vary over the axes over which any argument varies. Without types (``check_vma=False``, or
    outside of ``shard_map``) the result is ``fn`` itself. ``jax.grad`` (by the kernel's gradient), ``jax.vmap``,
    ``jax.lax.scan`` and ``jax.checkpoint`` are supported.

    Args:
      fn: takes arrays, trees of arrays, and further values, passed on unchanged; returns a tree of arrays.
        Arrays that ``fn`` closes over count as arguments, and must be equal on each device, as masks are.
    Returns:
      A function with the same arguments and results.
    Raises:
      ValueError: at the call: ``fn`` reads the device's index or communicates, so that the result varies over axes not
        listed by the arguments; or ``fn`` closes over an array that varies. At lowering: the kernel does not support
        the platform.
      NotImplementedError: raised by JAX for a derivative of the gradient, or for forward mode.
    """

    name = getattr(getattr(fn, "func", fn), "__name__", repr(fn))  # for a functools.partial, its function's name

    @functools.wraps(fn)
    def typed(*args: P.args, **kwargs: P.kwargs) -> R:
        if not types_are_checked.value:  # check_vma=False, or no shard_map
            return fn(*args, **kwargs)
        arrays, put_back = split_arrays((args, kwargs))

        def of_arrays(*values: jax.Array) -> Any:
            again, by_name = put_back(dict(zip(arrays, values, strict=True)))
            return cast(Callable[..., Any], fn)(*again, **by_name)

        # Arrays that the kernel closes over (a mask made beside it) are operands, too: such an array may be traced, and
        # below the kernel is traced again, also after that trace has ended (in the backward pass of a scan).
        jaxpr, consts, structure = _traced(of_arrays, *arrays.values())
        _check_no_communication(jaxpr, consts, name)
        operands = [*consts, *arrays.values()]
        axes = tuple(sorted(frozenset().union(*map(varying_axes, operands))))
        operands = [to_varying(value, axes) for value in operands]
        trained = {i: value for i, value in enumerate(operands) if jnp.issubdtype(value.dtype, jnp.inexact)}
        rest = {i: value for i, value in enumerate(operands) if i not in trained}
        dtypes = {i: value.dtype for i, value in trained.items()}

        def kernel(trained: dict[int, jax.Array], rest: dict[int, jax.Array]) -> Any:
            both = trained | rest
            return jax.tree.unflatten(structure, _run(jaxpr, *(both[i] for i in range(len(both)))))

        # The second result is the kernel's vjp function, a pytree of its residuals: these leave the operation as
        # arrays, and `backward` can call the function in a separate operation.
        def forward(trained: dict[int, jax.Array], rest: dict[int, jax.Array]) -> tuple[Any, Any]:
            return _call(lambda trained, rest: jax.vjp(lambda x: kernel(x, rest), trained), (trained, rest), axes, name)

        def backward(vjp: Any, cotangent: Any) -> tuple[Any, None]:
            (grads,) = _call(lambda vjp, cotangent: vjp(cotangent), (vjp, cotangent), axes, name)
            # Some kernels return a wider gradient, which JAX accepts from them and refuses later.
            return {i: grad.astype(dtypes[i]) for i, grad in grads.items()}, None

        # A custom rule, since JAX cannot differentiate the opaque operation.
        with_gradient = jax.custom_vjp(lambda trained, rest: _call(kernel, (trained, rest), axes, name))
        with_gradient.defvjp(forward, backward)
        return with_gradient(trained, rest)

    return typed


def _traced(fn: Callable[..., Any], *args: Any) -> tuple[core.Jaxpr, list[Any], Any]:
    """Returns (jaxpr, consts, structure) of ``fn(*args)``, traced without types (as with ``check_vma=False``).

    ``consts`` are the arrays that ``fn`` closes over, the values of ``jaxpr.constvars``; ``structure`` is the tree
    structure of the result. Only shapes and dtypes of ``args`` are used.
    """
    with types_are_checked(False):
        closed, results = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_shape, args))
    return closed.jaxpr, closed.consts, jax.tree.structure(results)


def _check_no_communication(jaxpr: core.Jaxpr, consts: list[Any], name: str) -> None:
    """Raises a ``ValueError`` if a kernel's result could vary over axes over which no argument varies.

    This is so if ``jaxpr`` has a collective or ``axis_index`` over a bound mesh axis, or if one of ``consts``, the
    arrays that the kernel closes over, varies by type. ``name`` is the kernel's name for the error.
    """
    # A kernel may have internal axes, such as the axis of the cores that share its work.
    asking = [eqn for eqn in all_equations(jaxpr.eqns) if eqn.primitive.name in _OF_THE_MESH]
    if uses := {eqn.primitive.name for eqn in asking if any(map(is_bound, named_axes(eqn)))}:
        raise ValueError(
            f"typed_kernel: {name} contains {', '.join(sorted(uses))}. A kernel's result must be a function of its "
            "arguments alone, since JAX derives its type from theirs. Pass the device's index as an argument, and "
            "communicate before or after the kernel."
        )
    # A closed-over array would keep its type in a program without types, and JAX compares the two in the gradient.
    if closed := frozenset().union(*map(varying_axes, consts)):
        raise ValueError(
            f"typed_kernel: {name} closes over an array that varies over {sorted(closed)}. Pass this array as an "
            "argument."
        )


def _call(fn: Callable[..., Any], args: Any, axes: tuple[str, ...], name: str) -> Any:
    """Returns ``fn(*args)``, run as a single opaque operation, with results that vary over ``axes`` by type.

    ``args`` is a tuple of trees of arrays. ``name`` is the kernel's name for errors.
    """
    jaxpr, consts, structure = _traced(fn, *args)
    outs = _KERNEL.bind(*consts, *jax.tree.leaves(args), jaxpr=jaxpr, name=name)
    return jax.tree.unflatten(structure, to_varying(outs, axes))


class _Kernel(core.Primitive):
    """Primitive of JAX that runs the jaxpr of a kernel; operands: the closed-over arrays, then the arguments."""

    multiple_results = True

    def is_high(self, *_: Any, **__: Any) -> bool:
        """Returns False, for JAX: the operation is then lowered unchanged, also if its jaxpr has references."""
        return False


_KERNEL = _Kernel("typed_kernel")


def _run(jaxpr: core.Jaxpr, *operands: Any) -> list[Any]:
    count = len(jaxpr.constvars)
    return eval_jaxpr(jaxpr, operands[:count], *operands[count:])


def _lowered(ctx: mlir.LoweringRuleContext, *operands: Any, jaxpr: core.Jaxpr, name: str) -> Any:
    """Returns the results of the kernel's ``jaxpr``, lowered to MLIR operations: JAX's lowering rule of the primitive.

    Raises:
      ValueError: the kernel cannot be lowered for the platform; ``name`` is the kernel's name for the error.
    """
    # The operands have types, and the program was traced without: the program's types match its operations.
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
    if untyped.tokens_out is not None:  # set by an interpreted kernel, which calls back to the host
        ctx.set_tokens_out(untyped.tokens_out)
    return results


def _batched(operands: Any, dims: Any, *, jaxpr: core.Jaxpr, name: str) -> Any:
    # The program is retraced with the batch dim, and stays one operation.
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
