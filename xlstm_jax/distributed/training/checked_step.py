"""``CheckedStep``: the ``jax.jit`` function of a step that users call, with checks before and after each call."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout
from xlstm_jax.distributed.training.arguments import ARGUMENTS
from xlstm_jax.distributed.training.moments import JittedCall, JittedStep, run_checks
from xlstm_jax.distributed.training.nan_inputs import naming_nans
from xlstm_jax.explicit_axes import on_auto_axes, on_set_mesh, outside_set_mesh
from xlstm_jax.introspection import TWO_MESHES


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
        self._runs_outside = False  # of a mesh that is set

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.checked_call(self.jitted, *args, **kwargs)

    def checked_call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``, in place of the compiled step, with the checks of a call of the step."""
        call = self._call(args, kwargs)
        run_checks("call", call)
        # Exclude metrics and moments: a maximum starts at minus infinity.
        params = getattr(call.named.get("state"), "params", None)
        with naming_nans({"batch": call.named.get("batch"), "state.params": params}):
            args, kwargs = on_set_mesh((call.args, call.kwargs))
            run = outside_set_mesh(function) if self._runs_outside else function
            try:
                returned = self._explained(call._replace(args=args, kwargs=kwargs), run)
            except ValueError as error:
                # JAX compiles no callback that returns values (jax.pure_callback) in a program with explicit arguments,
                # and refuses before the program runs and donates.
                if self._runs_outside or TWO_MESHES not in str(error):
                    raise
                self._runs_outside = True
                returned = outside_set_mesh(function)(*args, **kwargs)
            returned = on_set_mesh(returned)
        run_checks("returned", call)
        return returned

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._explained(self._call(args, kwargs), self.jitted.lower)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._explained(self._call(args, kwargs), self.jitted.trace)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._explained(self._call(args, kwargs), self.jitted.eval_shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` looks these up before `jitted` is set
            raise AttributeError(name)
        return getattr(self.jitted, name)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JittedCall:
        """Returns the call with its arguments by name, after a check that the names are those of the step."""
        named = dict(zip(self._step.arguments, args, strict=False)) | kwargs
        call = JittedCall(self._step, args, kwargs, named)
        run_checks("names", call)
        return call

    def _explained(self, call: JittedCall, function: Callable[..., Any]) -> Any:
        """Returns the result of ``function`` for a call; where JAX raises, the error names the argument at fault."""
        run_checks("placed", call)
        try:
            return function(*call.args, **call.kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            run_checks("refused", call._replace(error=error))
            raise
