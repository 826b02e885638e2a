"""How XLA executes the reduce-scatter of a gradient over one axis of a TPU torus, beside ``AllReduceGradients``.

    python -m benchmarks.scatters                     some slices of v5e, v5p and v6e; some minutes
    python -m benchmarks.scatters v5e:8x8 --shape 1024 16 64

The program computes the gradients of the same kernel in four layers, in bfloat16, each as a matrix product over 2,048
tokens of a device, and leaves each device its shard of the mean. It is compiled for absent chips, and the table lists
the collective in the compiled program, the bytes that a device sends, and the expected time of the program.
"""

import argparse
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

from xlstm_jax.distributed.data_parallel import AllReduceGradients
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import Option
from xlstm_jax.forecast import Forecast, forecast
from xlstm_jax.forecast.hardware import parse_topology

TOPOLOGIES = (
    "v5e:2x4",
    "v5e:4x4",
    "v5e:8x8",
    "v5e:8x16",
    "v5e:16x16",
    "v5p:2x2x4",
    "v5p:4x4x8",
    "v6e:4x4",
    "v6e:16x16",
)
LAYERS, TOKENS = 4, 2048
WAYS = {"reduce-scatter": (), "all-reduce": (AllReduceGradients(),)}


def compiled(topology: str, shape: Sequence[int], way: tuple[Option, ...]) -> Forecast:
    """Forecasts the gradients of a kernel [width, ...] in all layers, scattered along the first dim over one axis."""
    width, *features = shape
    devices = math.prod(parse_topology(topology).shape)
    mesh = AbstractMesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,))

    def local(x, y, kernel):
        def layer(carry, both):
            rows, cotangents = both
            gradient = jnp.einsum("td,t...->d...", rows, cotangents) / devices
            return carry, collectives.reduce_scatter(gradient, 0, ("fsdp",), way)

        return kernel - lax.scan(layer, None, (x, y))[1].astype(kernel.dtype)

    split, rows = P(None, "fsdp"), P(None, "fsdp")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, split), out_specs=split))

    def argument(dims, dtype):
        return jax.ShapeDtypeStruct((LAYERS, *dims), dtype, sharding=NamedSharding(mesh, split))

    args = (
        argument((devices * TOKENS, width), jnp.bfloat16),
        argument((devices * TOKENS, *features), jnp.bfloat16),
        argument(shape, jnp.float32),
    )
    return forecast(step, *args, topology=topology)


def main() -> None:
    """Compiles both ways for each topology, and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=TOPOLOGIES, help="slices of TPUs, as v5e:8x8")
    parser.add_argument("--shape", type=int, nargs="+", default=(1024, 16, 64), help="of the kernel (1024 16 64)")
    args = parser.parse_args()
    table = Table(title=f"gradients of a kernel {tuple(args.shape)} in bfloat16, {LAYERS} layers, one axis")
    for name in ("chips", "written as", "compiled to", "MB sent", "expected ms"):
        table.add_column(name, justify="right" if name in ("MB sent", "expected ms") else "left")
    for topology in track(args.topologies, "compiling"):
        for name, way in WAYS.items():
            found = compiled(topology, args.shape, way)
            kinds = ", ".join(sorted({collective.kind for collective in found.collectives}))
            time = found.step_time.expected * 1e3
            table.add_row(topology, name, kinds, f"{found.wire_bytes / 1e6:.1f}", f"{time:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
