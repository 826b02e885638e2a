"""Registry of module systems other than Linen, for the errors of functions that take a Linen module."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from xlstm_jax.distributed.data_parallel.policy import ShardPolicy


class OtherSystem(NamedTuple):
    """Module system whose models are passed to the library inside a call.

    ``package`` has the classes of the system, as "flax.nnx". ``passed_as`` is the call for an error text, as
    "nnx_model(make)".
    """

    package: str
    passed_as: str


OTHER_SYSTEMS: list[OtherSystem] = []  # filled by the package's face


def other_system(value: object) -> OtherSystem | None:
    """Returns the registered system of a module or of its class; None for an object of no such system."""
    cls = value if isinstance(value, type) else type(value)
    for system in OTHER_SYSTEMS:
        if any(f"{base.__module__}.".startswith(f"{system.package}.") for base in cls.__mro__):
            return system
    return None


@runtime_checkable
class ShardsItself(Protocol):
    """Protocol of a model that ``shard_modules`` shards by its method ``with_units``: of NNX."""

    def with_units(self, where: Any, policy: ShardPolicy) -> Any:
        """Returns a copy of the model in which the modules selected by ``where`` are units.

        A unit gathers its parameters when it runs, with the options in ``policy``. ``where`` is the argument of
        ``shard_modules`` (classes, or a predicate of path and module), or a ``UnitRule``.
        """
        ...
