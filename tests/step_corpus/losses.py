"""Loss functions in a user's style; each is called with local rows or with the global batch."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Loss = Any


def outputs(params: Any, apply_fn: Any, batch: Any, rng: Any) -> jax.Array:
    return apply_fn({"params": params}, batch["x"], rngs=rng)


def rows(params: Any, apply_fn: Any, batch: Any, rng: Any) -> jax.Array:
    """Returns the cross-entropy of each row."""
    return optax.softmax_cross_entropy_with_integer_labels(outputs(params, apply_fn, batch, rng), batch["y"])


def mean(*args: Any) -> jax.Array:
    return rows(*args).mean()


def squares(params: Any, apply_fn: Any, batch: Any, rng: Any) -> jax.Array:
    """Returns the mean squared error, a loss other than ``mean``."""
    return jnp.mean((outputs(params, apply_fn, batch, rng) - batch["target"]) ** 2)


def unit(x: jax.Array) -> jax.Array:
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


def of_rows(reduce: Any) -> Loss:
    """Returns a loss ``reduce(losses of rows)``."""
    return lambda *args: reduce(rows(*args))


def of_outputs(fn: Any) -> Loss:
    """Returns a loss ``fn(outputs, batch)``."""
    return lambda params, apply_fn, batch, rng: fn(outputs(params, apply_fn, batch, rng), batch)


def tokens(params: Any, apply_fn: Any, batch: Any, rng: Any) -> jax.Array:
    """Returns the loss of each token of rows of tokens."""
    logits = apply_fn({"params": params}, batch["x"][:, :-1], rngs=rng)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"][:, 1:])


def tokens_mean(*args: Any) -> jax.Array:
    return tokens(*args).mean()


def tokens_sum(*args: Any) -> jax.Array:
    return tokens(*args).mean(1).sum()


# ------------------------------------------------------------------------------------------------ masks and aux


def masked_mean(params: Any, apply_fn: Any, batch: Any, rng: Any) -> jax.Array:
    """Returns the mean over the rows with mask 1, whose number differs between devices."""
    return (rows(params, apply_fn, batch, rng) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)


def masked_pair(params: Any, apply_fn: Any, batch: Any, rng: Any) -> tuple[jax.Array, jax.Array]:
    return (rows(params, apply_fn, batch, rng) * batch["mask"]).sum(), batch["mask"].sum()


def masked_pair_aux(*args: Any) -> Any:
    return masked_pair(*args), {"weight": args[2]["mask"].mean()}


def mean_as_sum(*args: Any) -> tuple[jax.Array, jax.Array]:
    """Returns a mean where ``weighted=True`` expects a sum."""
    return masked_mean(*args), args[2]["mask"].sum()


def mean_aux(params: Any, apply_fn: Any, batch: Any, rng: Any) -> Any:
    logits = outputs(params, apply_fn, batch, rng)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), {"hits": jnp.mean(logits.argmax(-1) == batch["y"])}


def mean_stats(params: Any, apply_fn: Any, batch: Any, rng: Any, collections: Any) -> Any:
    logits, updated = apply_fn({"params": params, **collections}, batch["x"], rngs=rng, mutable=list(collections))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), updated


def sum_stats(*args: Any) -> Any:
    loss, updated = mean_stats(*args)
    return loss * len(args[2]["y"]), updated


# ------------------------------------------------------------------------------------------------- random draws


def diffusion(drawn: bool = True, reduce: Any = jnp.mean) -> Loss:
    """Returns a diffusion loss with noise and times drawn from rng, or computed from each row."""

    def loss(params: Any, apply_fn: Any, batch: Any, rng: Any) -> jax.Array:
        of_time, of_noise, of_model = jax.random.split(rng, 3)
        x = batch["x"]
        t, noise = jnp.abs(jnp.sin(x.sum(-1))), jnp.sin(37 * x)
        if drawn:
            t, noise = jax.random.uniform(of_time, (len(x),)), jax.random.normal(of_noise, x.shape)
        noisy = jnp.cos(t)[:, None] * x + jnp.sin(t)[:, None] * noise
        return reduce(jnp.mean((apply_fn({"params": params}, noisy, t, rngs=of_model) - noise) ** 2, axis=-1))

    return loss


# ------------------------------------------------------------------------------- statistics over the whole batch


def contrastive(axes: Any = None) -> Loss:
    """Returns InfoNCE with the rows of the batch as negatives; with ``axes``, the rows of all devices."""

    def loss(z: jax.Array, batch: Any) -> jax.Array:
        z, keys = unit(z), unit(batch["target"])
        mine = jnp.arange(len(z))
        if axes is not None:
            mine = mine + len(z) * lax.axis_index(axes)
            keys = lax.all_gather(keys, axes, axis=0, tiled=True)
        return optax.softmax_cross_entropy_with_integer_labels(10 * z @ keys.T, mine).mean()

    return of_outputs(loss)


def two_sided(axes: Any = None) -> Loss:
    """Returns InfoNCE in both directions, as in CLIP: gradients also flow through the gathered outputs."""

    def loss(z: jax.Array, batch: Any) -> jax.Array:
        z, keys = unit(z), unit(batch["target"])
        mine, all_z, all_keys = jnp.arange(len(z)), z, keys
        if axes is not None:
            mine = mine + len(z) * lax.axis_index(axes)
            all_z, all_keys = (lax.all_gather(a, axes, axis=0, tiled=True) for a in (z, keys))
        pairs = (10 * z @ all_keys.T, mine), (10 * keys @ all_z.T, mine)
        return sum(optax.softmax_cross_entropy_with_integer_labels(*pair).mean() for pair in pairs) / 2

    return of_outputs(loss)


def _mean_over(axes: Any) -> Any:
    return (lambda x: x.mean(0)) if axes is None else (lambda x: lax.pmean(x.mean(0), axes))


def covariance(axes: Any = None) -> Loss:
    """Returns a loss as in Barlow Twins: the distance of the batch's second moments from the identity."""

    def loss(z: jax.Array, batch: Any) -> jax.Array:
        average = _mean_over(axes)
        z = z - average(z)
        moments = average(z[:, :, None] * z[:, None, :])
        off = jnp.mean((moments - jnp.eye(z.shape[1])) ** 2)
        # A replicated value would stay replicated by type; adding 0 * (local rows) makes the type varying.
        return off + 0 * z.sum()

    return of_outputs(loss)


def advantages(axes: Any = None) -> Loss:
    """Returns a policy gradient loss with advantages normalised over the batch."""

    def loss(logits: jax.Array, batch: Any) -> jax.Array:
        average, reward = _mean_over(axes), batch["x"].sum(-1) + batch["y"]
        reward = reward - average(reward)
        reward = reward / jnp.sqrt(average(reward**2) + 1e-6)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)[:, 0]
        return -jnp.mean(chosen * reward)

    return of_outputs(loss)


def standardised(axes: Any = None) -> Loss:
    """Returns the squared error of outputs normalised over the batch, as by a batch norm in the loss."""

    def loss(z: jax.Array, batch: Any) -> jax.Array:
        average = _mean_over(axes)
        z = z - average(z)
        z = z / jnp.sqrt(average(z**2) + 1e-3)
        return jnp.mean((z - batch["target"]) ** 2)

    return of_outputs(loss)


hard_examples = of_rows(lambda losses: jnp.sort(losses)[len(losses) // 2 :].mean())
root_mean_square = of_outputs(lambda z, batch: jnp.sqrt(jnp.mean((z - batch["target"]) ** 2)))
worst_row = of_rows(jnp.max)
soft_worst = of_rows(lambda losses: jax.nn.logsumexp(3 * losses) / 3)
median = of_rows(jnp.median)
spread = of_rows(lambda losses: losses.mean() + losses.var())
marginal_entropy = of_outputs(lambda z, batch: -jax.scipy.special.entr(jax.nn.softmax(z).mean(0)).sum() + 0 * z.sum())


def dice(z: jax.Array, batch: Any) -> jax.Array:
    p, hot = jax.nn.softmax(z), jax.nn.one_hot(batch["y"], z.shape[1])
    return 1 - jnp.mean(2 * (p * hot).sum(0) / (p.sum(0) + hot.sum(0) + 1e-3))


def ranking(z: jax.Array, batch: Any) -> jax.Array:
    """Returns a loss on pairs of rows, which should be in the order of their targets."""
    score, target = z[:, 0], batch["target"][:, 0]
    later = target[:, None] > target[None]
    return jnp.mean(later * jax.nn.softplus(score[None] - score[:, None]))
