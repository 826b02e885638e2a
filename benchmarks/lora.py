"""Memory per device of LoRA on a frozen base, compared with training every weight: the table of docs/frozen.md.

    python -m benchmarks.lora --size 7B --topology v5e:2x4

The Transformers of ``large_models`` on a mesh with a single axis, with remat of layers, and losses by chunks of the
vocabulary. With LoRA each projection of the blocks has adapters, which are split like the base.
"""

import argparse
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks import models
from benchmarks.large_models import CONTEXT, SIZES, language_model
from xlstm_jax.distributed import plan_sharding
from xlstm_jax.forecast import forecast as forecast_step
from xlstm_jax.forecast.hardware.topologies import parse_topology
from xlstm_jax.forecast.training import Workload

RANK = 16
MIN_WEIGHT_SIZE = 2**14  # small enough to split the many small adapters


class LoRADense(nn.Dense):
    """Dense with weights W + A B; W has the same names as without adapters."""

    rank: int = RANK

    @nn.compact
    def __call__(self, x):
        a = self.param("lora_a", nn.initializers.lecun_normal(), (x.shape[-1], self.rank))
        b = self.param("lora_b", nn.initializers.zeros, (self.rank, self.features))
        return super().__call__(x) + x @ a.astype(x.dtype) @ b.astype(x.dtype)


class LoRABlock(models.TransformerBlock):
    """``TransformerBlock`` with adapters in its projections."""

    def project(self, name: str, features: int, x):
        return LoRADense(features, use_bias=False, **self.dtypes, name=name)(x)

    def add(self, name: str, residual, x, dense=LoRADense):
        return super().add(name, residual, x, dense)


def is_adapter(path: str) -> bool:
    """Whether a leaf belongs to an adapter, and so is trained."""
    return "lora_" in path


def workload(size: str, devices: int, frozen_dtype: str | None) -> Workload:
    """Creates the workload of a configuration with adapters on a base in ``frozen_dtype``; None trains every weight."""
    make = partial(language_model, devices=devices, shard_axes=("fsdp",), remat=True, chunked_head=True)
    made = make(SIZES[size], min_weight_size=MIN_WEIGHT_SIZE)
    return made if frozen_dtype is None else adapted(made, frozen_dtype)


def adapted(made: Any, frozen_dtype: str) -> Workload:
    """Adds adapters on a base in ``frozen_dtype`` to a workload of ``language_model``."""
    wrap = made.model.wrap
    model = made.model.clone(wrap=lambda cls: wrap(LoRABlock if cls is models.TransformerBlock else cls))
    return dataclasses.replace(made, model=model, trainable=is_adapter, frozen_dtype=frozen_dtype)


def measured(size: str, frozen_dtype: str | None, topology: str) -> dict[str, Any]:
    """Returns the bytes per device by kind, from the plan and from the forecast."""
    devices = parse_topology(topology).num_devices
    made, sizes = workload(size, devices, frozen_dtype), {"fsdp": devices}
    inputs = (jax.ShapeDtypeStruct((devices, CONTEXT), jnp.int32),)
    plan = plan_sharding(made.model, sizes, *inputs, tx=made.tx, **made.freezing)
    step, args = dataclasses.replace(made, inputs=inputs).build_step(sizes)
    found = forecast_step(step, *args, topology=topology, tokens=devices * CONTEXT)
    kept = {name: getattr(plan, name).per_device for name in ("parameters", "gradients", "optimizer")}
    return kept | {
        "arguments": found.memory.argument_bytes,
        "temporaries": found.memory.temporary_bytes,
        "in all": found.total_bytes,
        "fits": found.fits,
        "wire": found.wire_bytes,
        "flops": found.flops.total,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--size", choices=SIZES, default="7B", help="the model (default: 7B)")
    options.add_argument("--topology", default="v5e:2x4", help="chips that need not be there (default: v5e:2x4)")
    given = options.parse_args()
    for frozen_dtype in (None, "float32", "bfloat16"):
        name = "all weights trained" if frozen_dtype is None else f"LoRA on {frozen_dtype}"
        found = measured(given.size, frozen_dtype, given.topology)
        print(name, *(f"{what} {value:.3g}" for what, value in found.items()), sep=", ", flush=True)


if __name__ == "__main__":
    main()
