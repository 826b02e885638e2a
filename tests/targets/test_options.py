"""The options of ``compiler_options``, compiled on every slice: taken where the table says so, and refused elsewhere.

A quarter of an hour; ``SLICES=v5e:4x8,v5e:8x8`` in the environment takes these alone.
"""

import os

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.accelerators import TPUS
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast import CompileError, forecast

pytest.importorskip("libtpu")

ALL = [
    (tpu, shape, f"{name}:{'x'.join(map(str, shape))}")
    for name, tpu in TPUS.items()
    if tpu.xla_options
    for shape in tpu.slices
]
CHOSEN = [one for one in ALL if one[2] in os.environ.get("SLICES", one[2]).split(",")]


def of_all_collectives(axes):
    """A step with a gather and a scatter in a loop, an all-reduce, and an all-to-all."""
    mesh = DeviceMeshManager.create_abstract_mesh(axes)
    names = tuple(axes)

    def loss(weights, x):
        def layer(x, w):
            w = lax.all_gather(w, names, axis=0, tiled=True)
            return x + jnp.sin(x @ w) @ w.T, None

        return jnp.mean(lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    def step(weights, x, tokens):
        received = lax.all_to_all(tokens @ tokens, names, 0, 0)
        return jax.grad(loss)(weights, x), lax.psum(x, names), received @ received

    def abstract(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    width = max(256, mesh.size)
    places = (P(None, names), P(names), P(names))
    args = [abstract(places[0], 2, width, 256), abstract(places[1], 8 * mesh.size, width)]
    args += [abstract(places[2], mesh.size**2, 128, 128)]
    out = (places[0], P(), places[2])
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=places, out_specs=out, check_vma=False)), args


@pytest.mark.parametrize("tpu, shape, topology", CHOSEN, ids=lambda value: value if isinstance(value, str) else "")
def test_compiler_accepts_xla_options_exactly_on_the_slices_of_the_table(tpu, shape, topology):
    sizes = [size for size in shape if size > 1] or [1]
    step, args = of_all_collectives({f"fsdp_{name}": size for name, size in zip("xyz", sizes, strict=False)})
    expected = {name for name, slices in tpu.xla_options.items() if shape in slices}
    sets = [{name} for name in tpu.xla_options] if len(sizes) < 3 else [set(tpu.xla_options)]
    taken = set()
    for names in sets:
        try:
            forecast(step, *args, topology=topology, compiler_options=dict.fromkeys(names, True), cache=False)
            taken |= names
        except CompileError as error:
            assert "UNIMPLEMENTED" in str(error)
    assert taken == expected
