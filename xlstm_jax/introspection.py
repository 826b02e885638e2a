"""Introspection of JAX, Flax and optax: reads state of these libraries that has no public accessor.

The functions read frames, closures and tracers. No other module of the library reads frames, closures or tracers
(``tests/house/test_layers.py``); imports of private names are in ``private_names``. If a release hides the state, the
functions return their negative result. The module also reads signatures, and has fragments of JAX's error texts.
"""

import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from flax import linen as nn
from flax.core import lift
from flax.core.scope import in_filter

# ------------------------------------------------------------------------------------------------------------- frames

# JAX's functions that trace branches, with their files, because a user's function may also be named `cond`.
BRANCHES = {
    ("cond", "conditionals.py"),
    ("_cond", "conditionals.py"),
    ("switch", "conditionals.py"),
    ("_switch", "conditionals.py"),
    ("while_loop", "loops.py"),
}
_NAMES_OF_BRANCHES = frozenset(name for name, _ in BRANCHES)
# Packages whose functions may be running between the user's line and a warning: this package, and packages that trace
# or wrap functions.
_BETWEEN = {__name__.partition(".")[0], "jax", "flax", "optax", "contextlib", "functools"}


def warn_user(text: str) -> None:
    """Emits a Python warning with ``text``, at the line of the user's program that called this package or JAX."""
    # Python 3.12 has `skip_file_prefixes` for this; a number would change with each wrapper on the way.
    frame: FrameType | None = sys._getframe(1)
    stacklevel = 2  # 1 is this function
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(text, stacklevel=2 if frame is None else stacklevel)


def locals_of_traceback(error: Exception, function: str | None = None) -> list[Mapping[str, Any]]:
    """Returns the local variables of each frame in the traceback of ``error``, by name, outermost frame first.

    ``function``: only of frames of functions with this name; None: of all frames.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame.f_locals for frame in frames if function in (None, frame.f_code.co_name)]


def inside_branch() -> bool:
    """Returns whether this code is traced in a branch of ``lax.cond`` or ``lax.switch``, or in ``lax.while_loop``.

    A tracer does not contain its branch, so the function searches the frames.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name in _NAMES_OF_BRANCHES and (name, os.path.basename(file)) in BRANCHES:
            return True
        frame = frame.f_back
    return False


def transposes_a_shard_map() -> bool:
    """Returns whether this code runs in a backward pass through a ``jax.shard_map``, of a gradient taken around it.

    A gradient that the function under ``shard_map`` takes itself runs in no such pass. A tracer does not contain the
    pass, so the function searches the frames.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name.startswith("_shard_map_transpose") and os.path.basename(file) == "shard_map.py":
            return True
        frame = frame.f_back
    return False


def inside_map_variables(library_class: type[Any]) -> bool:
    """Returns whether this code runs inside an ``nn.map_variables`` of the user's model that maps parameters.

    ``nn.WeightNorm`` and ``nn.SpectralNorm`` use ``nn.map_variables``. Not counted are maps whose function is an
    instance of ``library_class``, which belong to the library and take shards, and maps of collections without
    "params", such as the map of Flax's ``scan_with_axes`` over dim names.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_map = frame.f_code.co_filename == lift.__file__ and "map_in_fn" in frame.f_code.co_freevars
        is_of_model = is_map and not isinstance(frame.f_locals["map_in_fn"], library_class)
        if is_of_model and in_filter(frame.f_locals["mapped_collections"], "params"):
            return True
        frame = frame.f_back
    return False


# ----------------------------------------------------------------------------------------------------------- closures


def closure(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the closure variables of a function, as {name: value}; {} if ``function`` is not a Python function."""
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def closure_of_lifted(method: Any) -> dict[str, Any]:
    """Returns the closure variables, by name, of the Linen transformation (``nn.remat``, ``nn.scan``) around a method.

    Follows ``__wrapped__`` from the outside to the first function with a closure variable named "transform", in which
    Flax keeps the lifted transformation. Without such a function, returns the variables of the innermost function; {}
    if ``method`` is not a Python function.
    """
    variables: dict[str, Any] = {}
    while inspect.isfunction(method) and "transform" not in variables:
        cells = zip(method.__code__.co_freevars, method.__closure__ or (), strict=True)
        variables, method = {name: cell.cell_contents for name, cell in cells}, getattr(method, "__wrapped__", None)
    return variables


def is_unchanged(module: nn.Module, method: str, cls: type[nn.Module]) -> bool:
    """Returns whether ``module`` runs the method named ``method`` as class ``cls`` defines it.

    False if a user's subclass overrides the method, or a transformation of the model (such as ``nn.map_variables``)
    wraps the method.
    """
    attribute = inspect.getattr_static(type(module), method)
    is_of_class = inspect.unwrap(attribute) is inspect.unwrap(getattr(cls, method))
    return is_of_class and "transform" not in closure_of_lifted(attribute)


def scans_over_params(cls: type[nn.Module]) -> bool:
    """Returns whether ``nn.scan`` made this class, and ``variable_axes`` has a layer dim for "params"."""
    method = vars(cls).get("__call__")
    # Linen wraps each method once. Around the method of a transformation a second wrapper stands.
    if not hasattr(getattr(method, "__wrapped__", None), "__wrapped__"):
        return False
    variables = closure_of_lifted(method)
    axes = variables.get("trafo_kwargs", {}).get("variable_axes", {}) if variables.get("transform") is lift.scan else {}
    return axes.get("params") is not None


def recomputes(cls: type[nn.Module]) -> bool:
    """Returns whether the method ``__call__`` of a Linen class, defined or inherited, is wrapped by ``nn.remat``.

    ``shard_module_params`` may be around ``nn.remat``. False if the outermost Linen transformation is another, such as
    ``nn.scan``.
    """
    return closure_of_lifted(inspect.getattr_static(cls, "__call__", None)).get("transform") is lift.checkpoint


# --------------------------------------------------------------------------------------------------------- signatures


def accepts_call(function: Callable[..., Any], count: int, names: Iterable[str] | None = None) -> bool:
    """Returns whether a function accepts ``count`` positional arguments and the keyword arguments ``names``.

    None: all keyword-only arguments of the function. Read off the signature; True for a function without a signature,
    such as some written in C, whose errors show at the call.
    """
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    if names is None:
        names = [name for name, parameter in takes.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    try:
        # Only positions and names matter to `bind`, so any values do.
        takes.bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- errors

# A fragment of JAX's error for a program with a callback that returns values, whose arguments are on explicit axes, and
# whose products are on axes of type Auto.
TWO_MESHES = "mesh should be the same across the entire program"
# JAX's error for a collective over axes along some of which the operand varies by its type, and along others not. The
# groups are the collective, the type of the operand, and the axes.
MIXED_AXES = re.compile(r"(\S+) can only accept axis_name .* Got input type: (.*), axes: \((.*)\) and input state")

# ------------------------------------------------------------------------------------------------------------- traces


def is_for_shapes(tracer: Any) -> bool:
    """Returns whether ``tracer`` belongs to a trace of ``nn.scan`` that is only for the shapes of a layer's outputs."""
    # JAX exports no name for a trace: in 0.10 the class name identifies it, later the debug info.
    trace = getattr(tracer, "_trace", None)
    while trace is not None:
        debug_info = getattr(getattr(trace, "frame", None), "debug_info", None)
        if type(trace).__name__ == "JaxprTrace" or getattr(debug_info, "traced_for", None) == "flax scan":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def equation_of(tracer: Any) -> tuple[Any, list[Any], int] | None:
    """Returns (equation that made a tracer, its operands as tracers, index of the tracer among the results).

    Returns None for an argument of the traced function, and for a tracer of a transformation such as ``jax.grad``.
    """
    eqn = getattr(tracer, "parent", None)
    operands, results = getattr(eqn, "in_tracers", None), getattr(eqn, "outvars", ())
    numbers = [number for number, var in enumerate(results) if var is getattr(tracer, "val", None)]
    return (eqn, list(operands), numbers[0]) if operands is not None and numbers else None
