"""Errors of units of Linen: where a unit would hand out shards, and where no module of a model is a unit."""

from collections.abc import Mapping

from flax import linen as nn

from xlstm_jax.formatting import path_pattern
from xlstm_jax.private_names import linen_callers

READERS = (nn.WeightNorm, nn.SpectralNorm)  # layers of Flax that read the parameters of another layer


def check_not_inside_reader(module: nn.Module) -> None:
    """Raises a ``ValueError`` if a wrapped module runs inside ``nn.WeightNorm`` or ``nn.SpectralNorm``.

    These layers read the parameters of the module inside, and would compute norms of shards.
    """
    for caller in linen_callers():
        if isinstance(caller, READERS):
            kind, layer = type(caller).__name__, type(module).__name__
            raise ValueError(
                f"'{'/'.join(module.path)}' is wrapped by shard_module_params, and nn.{kind} stands around it, "
                "which would take norms of shards. Wrap a module that contains both, and call "
                f"nn.{kind}(nn.{layer}(...)) of the plain class inside."
            )


SHOWN = 12  # modules that an error lists


def inside_map_error(path: str) -> ValueError:
    """Returns the ``ValueError`` for a module, chosen by a predicate, inside an ``nn.map_variables`` of the model.

    ``path`` is the path of the module. As a unit the module would have shards, from which the map would compute.
    """
    outer = path.rpartition("/")[0]
    return ValueError(
        f"shard_modules: '{path}' runs within an nn.map_variables of the model (nn.WeightNorm and nn.SpectralNorm "
        "contain one), which would compute from shards. Choose the module around the map: "
        f"where=lambda path, module: path == {outer!r}, or larger_than(size)."
    )


def no_unit_error(where: object, model: type[nn.Module], modules: Mapping[str, type[nn.Module]]) -> ValueError:
    """Returns the ``ValueError`` that ``where`` of ``shard_modules`` chooses no module; the text lists the modules.

    ``model`` is the class of the model, and ``modules`` has the classes of the modules that have run, by path.
    """
    outer_first = sorted(modules.items(), key=lambda item: item[0].count("/"))
    patterns = {path_pattern(f"{path}/")[:-1]: cls.__name__ for path, cls in outer_first if path}
    described = [f"{path!r} ({name})" for path, name in patterns.items()]
    more = f" and {len(described) - SHOWN} more" if len(described) > SHOWN else ""
    return ValueError(
        f"shard_modules: where={where!r} chooses none of the modules of {model.__name__}: "
        f"'' (the model itself), {', '.join(described[:SHOWN])}{more}. Pass a class or a predicate of one of these."
    )
