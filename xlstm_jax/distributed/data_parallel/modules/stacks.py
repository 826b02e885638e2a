"""Record of stacked layers (``nn.scan``) that a unit gathers at once, for warnings and forecasts."""

import dataclasses
from contextvars import ContextVar
from typing import Any


@dataclasses.dataclass(eq=False)
class Stacks:
    """Record of stacked layers (``nn.scan``) that run inside a unit, which gathers all layers' weights at once.

    ``layers`` maps the name of the layer's module (its class, without a name) to the class name of the layer:
    {"blocks": "Block"}. Scans of functions are not recorded, since their layers cannot be identified here.
    """

    layers: dict[str, str] = dataclasses.field(default_factory=dict)
    scan: type[Any] | None = None  # the class that ``nn.scan`` has made, until a unit or the layer is entered


RECORDED_STACKS: ContextVar[Stacks | None] = ContextVar("RECORDED_STACKS", default=None)  # set to record stacks
