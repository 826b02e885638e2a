"""``CheckedStep``: the ``jax.jit`` function of a step that users call, with checks before and after each call."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import tree_flatten

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout
from xlstm_jax.distributed.training.arguments import ARGUMENTS
from xlstm_jax.distributed.training.moments import JittedCall, JittedStep, checks_at, run_checks, run_rows
from xlstm_jax.distributed.training.nan_inputs import looks_for_nans, naming_nans
from xlstm_jax.explicit_axes import has_explicit_axes, on_auto_axes, on_set_mesh


class CheckedStep:
    """Compiled step that checks each call; errors name the argument and leaf at fault.

    Provides the methods of a ``jax.jit`` function: ``lower``, ``trace``, ``eval_shape``, ``clear_cache``.

    Args:
      step: the function to compile.
      layout: the layout of its batch, with the mesh of the step.
      arguments: names of the function's arguments by position.
      like: function of the arguments that returns the arguments that the results replace; see ``on_auto_axes``.
      needed: names of the arguments without which a call is refused; None: the arguments without a default.
      counting: ``counting(batch, args, kwargs)`` returns the names of results that ignore the weights of padded rows,
        by kind; see ``counting_padding``.
      options: options of ``jax.jit``.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        layout: BatchLayout,
        arguments: tuple[str, ...] = ARGUMENTS,
        *,
        arguments_replaced: Callable[..., PyTree],
        counting: Callable[[PyTree, tuple[Any, ...], dict[str, Any]], dict[str, list[str]]],
        needed: tuple[str, ...] | None = None,
        **options: Any,
    ):
        functools.update_wrapper(self, step)
        self.options = options
        self.jitted = jax.jit(on_auto_axes(step, layout.mesh, like=arguments_replaced), **options)
        takes = inspect.signature(step).parameters
        if needed is None:
            needed = tuple(name for name in arguments if takes[name].default is inspect.Parameter.empty)
        donated = [arguments[index] for index in np.atleast_1d(options["donate_argnums"])]
        self._step = JittedStep(layout, arguments, needed, donated, counting, set())
        self._known: set[object] = set()  # the kinds of the calls so far
        self._before_each, self._after_each = checks_at("call"), checks_at("returned")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.checked_call(self.jitted, *args, **kwargs)

    def checked_call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``, in place of the compiled step, with the checks of a call of the step."""
        call, explicit = self._call(args, kwargs), has_explicit_axes(jax.sharding.get_abstract_mesh())
        # Most checks depend on the kind of a call alone, and a training makes calls of a single kind.
        kind = _kind_of(call, explicit)
        if is_new := kind not in self._known:
            run_checks("names", call)
        run_rows(self._before_each, call)
        if is_new:
            run_checks("new call", call)
        if looks_for_nans():
            # Exclude metrics and moments: a maximum starts at minus infinity.
            params = getattr(call.named.get("state"), "params", None)
            with naming_nans({"batch": call.named.get("batch"), "state.params": params}):
                returned = self._run(call, function, explicit=explicit, is_new=is_new)
        else:
            returned = self._run(call, function, explicit=explicit, is_new=is_new)
        if is_new:
            self._known.add(kind)
        run_rows(self._after_each, call)
        return returned

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._run(self._new_call(args, kwargs), self.jitted.lower)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._run(self._new_call(args, kwargs), self.jitted.trace)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._new_call(args, kwargs), self.jitted.eval_shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` looks these up before `jitted` is set
            raise AttributeError(name)
        return getattr(self.jitted, name)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JittedCall:
        """Returns the call with its arguments by name."""
        return JittedCall(self._step, args, kwargs, dict(zip(self._step.arguments, args, strict=False)) | kwargs)

    def _new_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JittedCall:
        """Returns the call, after a check that its names are those of the step."""
        call = self._call(args, kwargs)
        run_checks("names", call)
        return call

    def _run(
        self, call: JittedCall, function: Callable[..., Any], *, explicit: bool = False, is_new: bool = True
    ) -> Any:
        """Returns the result of ``function`` for a call; where JAX raises, the error names the argument at fault.

        With ``explicit`` axes of the mesh that is set, arguments and results are placed on this mesh.
        """
        if explicit:
            args, kwargs = on_set_mesh((call.args, call.kwargs))
            call = call._replace(args=args, kwargs=kwargs)
        if is_new:
            run_checks("placed", call)
        try:
            returned = function(*call.args, **call.kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            run_checks("refused", call._replace(error=error))
            raise
        return on_set_mesh(returned) if explicit else returned


def _kind_of(call: JittedCall, explicit: bool) -> tuple[Any, ...]:
    """Returns what the checks of new calls depend on: names of arguments, structure and placement of the batch."""
    leaves, structure = tree_flatten(call.named.get("batch"))
    # Comparing shardings is faster than reading their specs. A tracer has none.
    shardings = tuple([None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None) for leaf in leaves])
    mesh = jax.sharding.get_abstract_mesh() if explicit else None
    return len(call.args), tuple(call.kwargs), type(call.kwargs.get("extra_trees")), structure, shardings, mesh
