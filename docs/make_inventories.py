"""Writes ``inventories/*.inv``, the link targets of types and code on the site: ``python docs/make_inventories.py``.

A build has no network, so this folder has the inventories that Sphinx would load from the sites of these projects:
only the names that signatures, docstrings and pages mention. Types are also listed under their defining module, as in
annotations.
"""

import importlib
import zlib
from pathlib import Path

FOLDER = Path(__file__).parent / "inventories"
SHORT = {"flax.linen.": "nn.", "flax.nnx.": "nnx.", "jax.lax.": "lax.", "jax.numpy.": "jnp."}  # usual aliases

# project: (address, {page: names}); "$" in a page stands for the name.
PROJECTS = {
    "python": (
        "https://docs.python.org/3/",
        {
            "library/functions.html": "int float bool complex",
            "library/stdtypes.html": "str bytes list tuple dict set frozenset type",
            "library/exceptions.html": "ValueError TypeError RuntimeError KeyError OSError ImportError",
            "library/collections.abc.html": "collections.abc.Callable collections.abc.Mapping collections.abc.Sequence "
            "collections.abc.Iterator collections.abc.Iterable collections.abc.Collection",
            "library/typing.html": "typing.Any typing.Literal",
            "library/pathlib.html": "pathlib.Path",
            "library/os.html": "os.PathLike",
        },
    ),
    "numpy": (
        "https://numpy.org/doc/stable/",
        {
            "reference/generated/$.html": "numpy.ndarray numpy.dtype",
            "reference/arrays.scalars.html": "numpy.number numpy.bool numpy.int64",
        },
    ),
    "jax": (
        "https://docs.jax.dev/en/latest/",
        {
            "_autosummary/$.html": "jax.Array jax.ShapeDtypeStruct jax.jit jax.shard_map jax.grad jax.value_and_grad "
            "jax.vmap jax.jvp jax.eval_shape jax.make_mesh jax.device_put jax.checkpoint jax.custom_vjp jax.tree.map "
            "jax.lax.scan jax.lax.psum jax.lax.pmean jax.lax.psum_scatter jax.lax.all_gather jax.lax.all_to_all "
            "jax.lax.map jax.lax.while_loop jax.lax.axis_index jax.distributed.initialize jax.debug.print "
            "jax.random.key jax.random.fold_in jax.numpy.sum jax.numpy.zeros jax.numpy.clip jax.numpy.float32",
            "jax.sharding.html": "jax.sharding.Mesh jax.sharding.NamedSharding jax.sharding.PartitionSpec",
        },
    ),
    "flax": (
        "https://flax-linen.readthedocs.io/en/latest/",
        {
            "api_reference/flax.linen/module.html": "flax.linen.Module flax.linen.intercept_methods",
            "api_reference/flax.linen/layers.html": "flax.linen.Dense flax.linen.DenseGeneral flax.linen.Embed "
            "flax.linen.BatchNorm flax.linen.Dropout flax.linen.RNN flax.linen.Sequential flax.linen.SpectralNorm",
            "api_reference/flax.linen/transformations.html": "flax.linen.remat flax.linen.scan flax.linen.jit "
            "flax.linen.vmap flax.linen.map_variables flax.linen.remat_scan flax.linen.cond",
            "api_reference/flax.linen/spmd.html": "flax.linen.Partitioned flax.linen.with_partitioning "
            "flax.linen.get_partition_spec",
            "api_reference/flax.training.html": "flax.training.train_state.TrainState",
        },
    ),
    "nnx": (
        "https://flax.readthedocs.io/en/latest/",
        {
            "api_reference/flax.nnx/module.html": "flax.nnx.Module",
            "api_reference/flax.nnx/rnglib.html": "flax.nnx.Rngs",
            "api_reference/flax.nnx/variables.html": "flax.nnx.Param flax.nnx.Variable",
            "api_reference/flax.nnx/graph.html": "flax.nnx.split flax.nnx.merge",
            "api_reference/flax.nnx/training/optimizer.html": "flax.nnx.Optimizer",
        },
    ),
    "optax": (
        "https://optax.readthedocs.io/en/latest/",
        {
            "api/transformations.html": "optax.GradientTransformation optax.GradientTransformationExtraArgs "
            "optax.add_decayed_weights optax.clip_by_global_norm optax.ema",
            "api/optimizers.html": "optax.adamw optax.adam optax.sgd optax.lion optax.lamb optax.lars optax.adafactor "
            "optax.lbfgs",
            "api/contrib.html": "optax.contrib.muon optax.contrib.MuonDimensionNumbers",
            "api/optimizer_wrappers.html": "optax.MultiSteps optax.apply_if_finite",
            "api/optimizer_schedules.html": "optax.inject_hyperparams",
            "api/combining_optimizers.html": "optax.chain",
            "api/apply_updates.html": "optax.apply_updates",
            "api/losses.html": "optax.softmax_cross_entropy_with_integer_labels",
        },
    ),
}
# A type of annotations without a page; the dtypes page of arrays explains the type.
ALSO = {"jax": [("jax._src.typing.SupportsDType", "_autosummary/jax.numpy.dtype.html#jax.numpy.dtype")]}


def entries(project):
    """Yields (name, place) of a project's inventory, for the imported and the defining name."""
    for page, names in PROJECTS[project][1].items():
        for name in names.split():
            place = f"{page.replace('$', name)}#{name}"
            yield name, place
            yield from ((other, place) for other in _other_names(name))
    yield from ALSO.get(project, [])


def _other_names(name):
    value = _object(name)
    defined = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"
    names = {defined} if isinstance(value, type) and "." in name else set()
    names |= {short + name.removeprefix(full) for full, short in SHORT.items() if name.startswith(full)}
    return sorted(names - {name})


def _object(name):
    """Returns the object with this name; raises if missing."""
    module, _, attribute = name.rpartition(".")
    if not module:
        return getattr(importlib.import_module("builtins"), name)
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return getattr(_object(module), attribute)


def addresses():
    """Returns the page of each dotted name, of all projects."""
    places = ((name, address + place) for project, (address, _) in PROJECTS.items() for name, place in entries(project))
    return {name: place for name, place in places if "." in name}


def write(project):
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    lines = "".join(f"{name} py:class 1 {place} -\n" for name, place in sorted(entries(project)))
    packed = zlib.compress(lines.encode(), 9)
    head += "# The remainder of this file is compressed using zlib.\n"
    (FOLDER / f"{project}.inv").write_bytes(head.encode() + packed)


def main():
    FOLDER.mkdir(exist_ok=True)
    for project in PROJECTS:
        write(project)


if __name__ == "__main__":
    main()
