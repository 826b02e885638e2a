"""Steps with sequences split over "cp": positions, labels and layouts, right and wrong."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.step_corpus.entries import Case, Entry, Setting, batch_on_mesh, mesh_of
from xlstm_jax.distributed import make_train_step, partition_specs, value_and_grad
from xlstm_jax.distributed.device_mesh import to_zigzag
from xlstm_jax.distributed.model_parallel import context_positions, in_layout

SPEC, DEVICES = P("fsdp", "cp"), 4


# ------------------------------------------------------------------------------------------------------------- losses


def next_tokens(params: Any, apply_fn: Any, batch: Any, rng: Any, positions: Any = None) -> jax.Array:
    """Returns the loss of labels stored beside their tokens; positions of the batch, or given."""
    positions = batch["positions"] if positions is None else positions
    logits = apply_fn({"params": params}, batch["x"], positions)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def with_positions(of: Any) -> Any:
    """Returns ``next_tokens`` with positions ``of(local tokens)``."""
    return lambda params, apply_fn, batch, rng: next_tokens(
        params, apply_fn, batch, rng, jnp.broadcast_to(of(batch["x"].shape[1]), batch["x"].shape)
    )


def index_times_length(length: int) -> jax.Array:
    """Returns handwritten positions, right for contiguous tokens."""
    return lax.axis_index("cp") * length + jnp.arange(length)


def shifted_inside(params: Any, apply_fn: Any, batch: Any, rng: Any) -> jax.Array:
    """Drops the label of a device's last token, which another device has."""
    logits = apply_fn({"params": params}, batch["x"], batch["positions"])
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["x"][:, 1:]).mean()


# -------------------------------------------------------------------------------------------------------------- steps


def natural(batch: Any) -> Any:
    return batch


def laid_out(batch: Any) -> Any:
    return to_zigzag(batch, DEVICES)


def laid_out_but_positions(batch: Any) -> Any:
    """Adds positions in natural order after the layout."""
    return {**laid_out(batch), "positions": batch["positions"]}


def ready(entry: Entry, setting: Setting, given: Any = natural, **split: Any) -> Case:
    split = split or {"batch_spec": SPEC}
    options = {"check_vma": setting.check_vma, "allow_replicated": True, **split, **entry.options}
    step = make_train_step(entry.loss, mesh_of(entry.mesh), **options)
    return Case(step, entry.state(setting), given(batch_on_mesh(entry.model)), jax.random.key(5), {})


def own(entry: Entry, setting: Setting, given: Any = natural, layout: str | None = "zigzag") -> Case:
    """Returns a step with a handwritten ``shard_map``; ``layout`` None leaves the layout of tokens open."""
    state, mesh = entry.state(setting), mesh_of(entry.mesh)
    specs = partition_specs(state.params, mesh)

    @jax.jit
    def step(state: Any, batch: Any, rng: jax.Array) -> tuple[Any, Any]:
        loss = lambda params, batch: entry.loss(params, state.apply_fn, batch, rng)  # noqa: E731
        gradients = value_and_grad(loss, ("fsdp", "cp"))

        def local(params: Any, batch: Any) -> tuple[Any, Any]:
            if layout is None:
                return gradients(params, batch)
            with in_layout(batch, layout) as batch:
                return gradients(params, batch)

        where = {"mesh": mesh, "in_specs": (specs, SPEC), "out_specs": (P(), specs)}
        value, grads = jax.shard_map(local, check_vma=setting.check_vma, **where)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": value}

    kwargs = {"loss_fn": entry.loss, "batch_spec": SPEC}
    return Case(step, state, given(batch_on_mesh(entry.model)), jax.random.key(5), kwargs)


def entry(name: str, *, verdict: str, make: Any = ready, loss: Any = next_tokens, **more: Any) -> Entry:
    kind = "own: sequence" if getattr(make, "func", make) is own else "ready: sequence"
    return Entry(name, kind, verdict, make, loss, **{"model": "sequence", "mesh": "sequence", "nnx": False, **more})


right = functools.partial(entry, verdict="right")
wrong = functools.partial(entry, verdict="wrong")
ZIGZAG = {"layout": "zigzag"}
OTHER_TOKENS = r"context_positions|must exchange them over 'cp'"
by_context = with_positions(lambda length: context_positions(length, "cp"))

ENTRIES = [
    right("contiguous"),
    right("contiguous, positions by hand", loss=with_positions(index_times_length)),
    right("zigzag", options=ZIGZAG),
    right("zigzag, positions of the layout, minibatches", loss=by_context, options=ZIGZAG | {"num_minibatches": 2}),
    right("laid out before", make=functools.partial(ready, given=laid_out), loss=by_context),
    right("laid out before, positions in natural order", make=functools.partial(ready, given=laid_out_but_positions)),
    right("zigzag, the model says so too", model="sequence_zigzag", options=ZIGZAG),
    right("zigzag", make=own),
    right("laid out before", make=functools.partial(own, given=laid_out), loss=by_context),
    wrong("zigzag, positions by hand", loss=with_positions(index_times_length), options=ZIGZAG, names=OTHER_TOKENS),
    wrong("positions of the device's tokens", loss=with_positions(jnp.arange), names=OTHER_TOKENS),
    wrong("labels shifted in the loss", loss=shifted_inside, options=ZIGZAG, names=OTHER_TOKENS),
    wrong("labels shifted in the loss, contiguous", loss=shifted_inside, names=OTHER_TOKENS),
    wrong("attention to the device's tokens", model="sequence_alone", options=ZIGZAG, names=OTHER_TOKENS),
    wrong(
        "the model says zigzag, the batch is not laid out",
        model="sequence_zigzag",
        refused=r"given layout='zigzag', and the tokens of this step lie contiguous over 'cp'",
    ),
    wrong(
        "the model says contiguous, the batch is laid out",
        make=functools.partial(ready, given=laid_out),
        model="sequence_contiguous",
        refused=r"given layout='contiguous', and the tokens of this step lie zigzag over 'cp'",
    ),
    wrong(
        "the step says contiguous, the batch is laid out",
        make=functools.partial(ready, given=laid_out),
        options={"layout": "contiguous"},
        refused=r"is laid out in zigzag, and the layout here is layout='contiguous'",
    ),
    wrong(
        "rows split in place of the sequence",
        make=functools.partial(ready, batch_axes=("fsdp", "cp")),
        refused=r"the step splits rows of its batch over \('fsdp', 'cp'\)",
    ),
    wrong(
        "laid out before, positions by hand",
        make=functools.partial(own, given=laid_out),
        loss=with_positions(index_times_length),
        names=OTHER_TOKENS,
    ),
    wrong(
        "the model says zigzag, nothing else does",
        make=functools.partial(own, layout=None),
        model="sequence_zigzag",
        refused=r"layout='zigzag', and nothing says that the tokens over 'cp' are laid out so",
    ),
    wrong(
        "an array in zigzag order, not opened",
        make=functools.partial(own, layout=None, given=laid_out),
        refused=r"in zigzag order is used as an array in natural order",
    ),
]
