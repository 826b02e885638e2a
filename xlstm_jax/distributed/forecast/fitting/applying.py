"""How a training takes over what the search found: the lines of code, and the arguments of the command line.

An ``options`` is an ``Options`` everywhere here; its own file imports this one.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from xlstm_jax.distributed.optimizers.offloading.offload import NO_OFFLOAD
from xlstm_jax.wording import format_axes, format_mesh


def code_of(options: Any) -> str:
    """What to write in the training, line by line; each is at most 60 columns wide for the usual names of axes."""
    gathered_again = not options.keep_gathered and not options.remat  # nn.remat gathers again by itself
    wrapper = [
        "    shard_module_params,",
        f"    axis_name={format_axes(options.shard_axes)},",
        f"    min_weight_size={options.min_weight_size},",
        *(["    reshard_after_forward=True,"] if gathered_again else []),
    ]
    return "\n".join(
        [
            "mesh = DeviceMeshManager.create_device_mesh(",
            f"    {dict(options.mesh)}",
            ")",
            *(["wrap = partial(", *wrapper, ")"] if options.shard_axes else []),
            *(["block = nn.remat(wrap(Block), prevent_cse=False)"] if options.remat else []),
            *(_offloaded(options) if options.offload != NO_OFFLOAD else []),
            "step = make_train_step(",
            f"    loss_fn, mesh, {tuple(options.mesh)}, num_minibatches={options.num_minibatches}",
            ")",
        ]
    )


def _offloaded(options: Any) -> list[str]:
    return [
        "state = create_train_state(",
        "    model, tx, mesh, rng, inputs,",
        f"    batch_axes={tuple(options.mesh)},",
        "    offload=Offload(),",
        ")",
    ]


def command_of(options: Any, factory: str, topology: str, settings: Mapping[str, Any]) -> str:
    """The command that forecasts these options again, over several lines.

    Args:
      options: those to forecast.
      factory: as ``--factory`` takes it.
      topology: as ``--topology`` takes it.
      settings: values of the factory's arguments, each of which becomes a ``--set``.
    """
    more = [f"--minibatches {options.num_minibatches}"] if options.num_minibatches > 1 else []
    more += ["--offload"] if options.offload != NO_OFFLOAD else []
    parts = [
        f"xlstm-jax forecast --factory {factory}",
        " ".join([f"--topology {topology} --mesh {format_mesh(options.mesh)}", *more]),
        *(f"--set {shlex.quote(f'{name}={value!r}')}" for name, value in settings.items()),
    ]
    return " \\\n    ".join(parts)
