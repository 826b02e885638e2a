"""Loading and calling of the user's factory: a function that returns a ``Workload``, given on the command line.

  "my_project.train:training"  --load_factory-->  Factory  --workload(options, chosen)-->  Workload

A factory receives the options that it declares as arguments. A factory with ``**sharding`` also receives the arguments
of ``shard_modules`` and ``shard_module_params`` that a search varies, and passes them on.

A factory is user code and may raise anything. Its error becomes a ``FactoryError``: a line with the call, the error
and the line of the user's file.
"""

import dataclasses
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from xlstm_jax.distributed.data_parallel.modules.shard_modules import shard_modules
from xlstm_jax.distributed.optimizers.offload import NO_OFFLOAD, Offload
from xlstm_jax.forecast.training.fitting import Options
from xlstm_jax.forecast.training.workload import Workload, described

AXES = ("shard_axes", "axis_name")  # argument names for the axes to split over: a factory's, and the wrappers'
# Options that a search varies: description, and possible argument names of a factory.
VARIED = {
    "the axes to split over": AXES,
    "min_weight_size": ("min_weight_size",),
    "weights gathered again": ("keep_gathered", "reshard_after_forward"),
    "remat": ("remat",),
}
PASSED_ON = ("axis_name", "min_weight_size", "reshard_after_forward")  # options passed through **sharding
SHARDING = tuple(inspect.signature(shard_modules).parameters)[2:]  # all but the model and its submodules
NO_ARGUMENT = re.compile("unexpected keyword argument|multiple values for argument")  # Python's errors


class FactoryError(ValueError):
    """The factory cannot be found, imported or called, or does not return a ``Workload``."""


@dataclass(frozen=True)
class Factory:
    """A user's function, with its name on the command line."""

    name: str
    function: Callable[..., Any]

    @cached_property
    def argument_names(self) -> tuple[str, ...]:
        """Names of the arguments that the user's function takes by keyword, without ``**sharding``."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return tuple(p.name for p in inspect.signature(self.function).parameters.values() if p.kind in named)

    @cached_property
    def takes_sharding(self) -> bool:
        """Whether the user's function has an argument like ``**sharding``, under any name."""
        kinds = [p.kind for p in inspect.signature(self.function).parameters.values()]
        return inspect.Parameter.VAR_KEYWORD in kinds

    @property
    def accepted_options(self) -> tuple[str, ...]:
        """Names of the options that reach the user's function: its arguments, and options that ``**sharding`` takes."""
        return (*self.argument_names, *(PASSED_ON if self.takes_sharding else ()))

    @property
    def axes_name(self) -> str | None:
        """Name of the function's argument for the axes to split over: "shard_axes" or "axis_name".

        None if the function takes neither: its axis names are fixed.
        """
        return next((name for name in AXES if name in self.accepted_options), None)

    @property
    def fixed_options(self) -> list[str]:
        """Descriptions, such as "remat", of the options of a search that the user's function does not take."""
        return [option for option, names in VARIED.items() if not set(names) & set(self.accepted_options)]

    def arguments(self, options: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments for a call of the user's function, by name; does not call the function.

        Args:
          options: options to pass, as far as the function takes an argument of this name; others are dropped.
          chosen: values of ``--set`` by name, always passed; they replace options of the same name.
        Raises:
          FactoryError: the function has no argument of a chosen name, and no ``**sharding``.
        """
        if unknown := [name for name in chosen if name not in self.argument_names and not self.takes_sharding]:
            raise self._unknown(unknown[0])
        return {name: value for name, value in options.items() if name in self.accepted_options} | dict(chosen)

    def _unknown(self, name: str) -> FactoryError:
        """Returns the error for ``--set name=...`` if the factory has no argument ``name``, with the nearest argument.

        For a factory with ``**sharding`` the arguments of ``shard_modules`` count, too.
        """
        names, passed_on = self.argument_names, ""
        if self.takes_sharding:
            names = (*names, *SHARDING)
            passed_on = f", and passes others on, as to shard_modules, which has {', '.join(SHARDING)}"
        near = get_close_matches(name, names, n=1)
        cure = f"Did you mean {near[0]}?" if near else "Declare it, with a default."
        return FactoryError(
            f"--set {name}=...: {self.name} has no argument of this name; it has "
            f"{', '.join(self.argument_names) or 'none'}{passed_on}. {cure}"
        )

    def workload(
        self,
        mesh: dict[str, int],
        chosen: Mapping[str, Any],
        offload: Offload = NO_OFFLOAD,
        varied: Mapping[str, Any] = MappingProxyType({}),
    ) -> Workload:
        """Calls the user's function for a mesh, and returns its ``Workload`` (model, optimizer, batch and loss).

        The call has keyword arguments only: the options of the mesh and of ``varied``, as far as the function takes
        them, and ``chosen``.

        Args:
          mesh: {axis: size}. Becomes options: the axes to split parameters over, whose names begin with "fsdp", and the
            number of devices.
          chosen: arguments of ``--set`` by name, always passed; they replace options of the same name.
          offload: replaces the ``offload`` of the returned workload; ``NO_OFFLOAD`` keeps the function's value.
          varied: options that a search varies, by name; further options keep the function's defaults.
        Raises:
          FactoryError: the function raises, has no argument of a chosen name, or does not return a ``Workload``.
        """
        # Both argument names for the axes are options: the factory receives the name that it declares.
        options = dict.fromkeys(AXES, Options(mesh).shard_axes) | {"devices": math.prod(mesh.values())} | dict(varied)
        arguments = self.arguments(options, chosen)
        call = f"{self.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
        try:
            made = self.function(**arguments)
        except Exception as error:  # a user's function may raise anything
            for name in chosen:
                # Arguments in **sharding are passed on, so an unknown name is an error of the inner function.
                if name not in self.argument_names and NO_ARGUMENT.search(str(error)) and f"'{name}'" in str(error):
                    raise self._unknown(name) from error
            raise FactoryError(f"{call} raised {described(error)}.") from error
        if not isinstance(made, Workload):
            raise FactoryError(
                f"{call} returned {type(made).__name__}; return xlstm_jax.forecast.training.Workload(model, tx, batch, "
                "loss_fn)."
            )
        return made if offload == NO_OFFLOAD else dataclasses.replace(made, offload=offload)


def settings_of(options: Options) -> dict[str, Any]:
    """Returns the options of a search as keyword arguments {name: value}, under every name that a factory may use.

    A factory is a user's function that returns a workload. The axes to split over are both "shard_axes" and
    "axis_name". Whether gathered weights are kept is both "keep_gathered" and "reshard_after_forward", which is True if
    they are not kept and ``remat`` is False.
    """
    return {
        **dict.fromkeys(AXES, options.shard_axes),
        "min_weight_size": options.min_weight_size,
        "remat": options.remat,
        "keep_gathered": options.keep_gathered,
        "reshard_after_forward": not options.keep_gathered and not options.remat,  # nn.remat implies the second gather
    }


def load_factory(name: str) -> Factory:
    """Imports the user's function ``package.module:function`` named ``name``; searches the current directory first.

    Adds the current directory to ``sys.path``, if missing.

    Raises:
      FactoryError: the name has another form, the module cannot be imported, or the module lacks the function.
    """
    module_name, _, function_name = name.partition(":")
    if os.sep in module_name or (module_name.endswith(".py") and Path(module_name).exists()):
        raise FactoryError(f"--factory {name!r} is a path, not package.module:function. {_as_module(name)}")
    if not (function_name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise FactoryError(f"--factory {name!r} is not package.module:function, as xlstm_jax.cli.example:training.")
    # A console script has its folder first in `sys.path`, not the current directory as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    # The import runs the user's code: a script may train, print or exit.
    module = _imported(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [other for other, value in vars(module).items() if inspect.isfunction(value)]
        near = get_close_matches(function_name, names, cutoff=0.3) or names[:3]
        raise FactoryError(
            f"--factory {name!r}: {module_name} has no function {function_name!r}; it has {', '.join(near) or 'none'}."
        )
    return Factory(name, function)


def _as_module(name: str) -> str:
    """Returns the advice for a path, ``--factory folder/file.py:function``: "Write folder.file:function."

    For a path that cannot be a module name, the advice is to run the command in the folder of the file.
    """
    file_name, _, function_name = name.partition(":")
    path = Path(os.path.relpath(file_name)).with_suffix("")
    if not all(part.isidentifier() for part in path.parts):  # above the current directory, for example
        where = Path(file_name).parent
        return f"Run the command in {where}, and write {path.name}:{function_name or 'function'}."
    return f"Write {'.'.join(path.parts)}:{function_name or 'function'}."


def _imported(name: str) -> ModuleType:
    """Imports the factory's module, whose dotted name is ``name``, and returns it.

    Raises:
      FactoryError: the import fails; with the cause.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Either the factory's module or a parent package is missing, or a module imported by the factory's module.
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise FactoryError(
                f"--factory: there is no module {error.name!r}, neither in {os.getcwd()} nor among the installed "
                "packages. Run the command in the folder that contains the module."
            ) from error
        raise FactoryError(f"--factory: importing {name} raised {described(error)}; is it installed here?") from error
    except Exception as error:  # a user's module may raise anything
        raise FactoryError(f"--factory: importing {name} raised {described(error)}.") from error
