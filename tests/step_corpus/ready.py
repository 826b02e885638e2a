"""Steps of ``make_train_step``: right steps with options, and losses that differ from the loss on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.step_corpus import losses
from tests.step_corpus.entries import Case, Entry, Setting, batch_on_mesh, mesh_of
from xlstm_jax.distributed import make_train_step, muon, skip_nonfinite, unbox
from xlstm_jax.distributed.metrics import Compose, WeightedMean

DP, XY = ("dp", "fsdp"), ("x", "y")
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))
TXS = {
    "clipping": CLIPPED,
    "muon": muon(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "skip_nonfinite": skip_nonfinite(optax.adamw(1e-3)),
}
BFLOAT16 = {"gather_dtype": "bfloat16", "grad_scatter_dtype": "bfloat16"}


def ready(entry: Entry, setting: Setting) -> Case:
    mesh, options = mesh_of(entry.mesh), dict(entry.options)
    rest = (options["metric"].empty(entry.axes, mesh),) if "metric" in options else ()
    step = make_train_step(entry.loss, mesh, entry.axes, check_vma=setting.check_vma, allow_replicated=True, **options)
    return Case(step, entry.state(setting), batch_on_mesh(entry.model), jax.random.key(5), {}, rest)


def closes_over(entry: Entry, setting: Setting) -> Case:
    """Returns a step whose loss reads outer parameters instead of its argument."""
    outer = jax.device_get(unbox(entry.state(setting).params))

    def loss(params: Any, *rest: Any) -> jax.Array:
        return losses.mean(outer, *rest)

    step = make_train_step(loss, mesh_of(entry.mesh), entry.axes, check_vma=setting.check_vma, allow_replicated=True)
    return Case(step, entry.state(setting), batch_on_mesh(entry.model), jax.random.key(5), {})


def entry(name: str, kind: str, loss: Any = losses.mean, *, verdict: str, **more: Any) -> Entry:
    return Entry(name, kind, verdict, more.pop("make", ready), loss, **more)


right = functools.partial(entry, verdict="right")
wrong = functools.partial(entry, verdict="wrong")


def metric_loss(*args: Any) -> Any:
    loss, aux = losses.mean_aux(*args)
    return loss, {"hits": aux["hits"]}


def with_constant(*args: Any) -> jax.Array:
    return 1e4 + losses.mean(*args)


RIGHT = [
    right("one axis", "ready step", mesh="fsdp"),
    right("two axes", "ready step"),
    right("a tuple of axes", "ready step", mesh="tuple"),
    right("copies of shards", "ready step", mesh="copies"),
    right("layer norm", "ready: model", model="norm"),
    right("head of zeros", "ready: model", model="zero_head", mesh="fsdp"),
    right("bfloat16 compute", "ready: dtypes", model="bfloat16", tolerance=0.06),
    right("bfloat16 on the wire", "ready: dtypes", wrap=BFLOAT16, mesh="fsdp", tolerance=0.06),
    right("attention", "ready: model", model="attention", mesh="fsdp"),
    right("scan and remat", "ready: model", model="scan"),
    right("batch_stats", "ready: collections", losses.mean_stats, model="stats"),
    right("tied table, rows of no token", "ready: model", losses.tokens_mean, model="tied", mesh="fsdp"),
    right("experts, one never chosen", "ready: model", model="experts", mesh="fsdp"),
    right("convolution", "ready: model", model="conv", mesh="tuple"),
    right("frozen leaves", "ready: frozen", trainable=lambda path: "Dense_0" not in path, nnx=False),
    right("adapters that begin at 0", "ready: frozen", model="lora", trainable=lambda path: "lora" in path),
    right("two minibatches", "ready: minibatches", options={"num_minibatches": 2}),
    right(
        "minibatches, reduced once",
        "ready: minibatches",
        options={"num_minibatches": 4, "accumulation": "reduce_once"},
        nnx=False,
    ),
    right(
        "minibatches, copies once",
        "ready: minibatches",
        mesh="copies",
        options={"num_minibatches": 2, "accumulation": "reduce_replicas_once"},
        nnx=False,
    ),
    right("uneven weights", "ready: weights", losses.masked_pair, options={"weighted": True}),
    right(
        "uneven weights, minibatches, aux",
        "ready: weights",
        losses.masked_pair_aux,
        options={"weighted": True, "has_aux": True, "num_minibatches": 2},
        mesh="fsdp",
        nnx=False,
    ),
    right("aux", "ready: aux and metric", losses.mean_aux, options={"has_aux": True}),
    right(
        "metric",
        "ready: aux and metric",
        metric_loss,
        options={"metric": Compose({"hits": WeightedMean()})},
        nnx=False,
    ),
    *(right(f"optimizer: {name}", "ready: optimizer", tx=tx, nnx=False, tolerance=0.02) for name, tx in TXS.items()),
    right(
        "noise from rng", "ready: draws", losses.diffusion(), model="denoiser", without_draws=losses.diffusion(False)
    ),
    right(
        "noise from rng, minibatches",
        "ready: draws",
        losses.diffusion(),
        model="denoiser",
        without_draws=losses.diffusion(False),
        options={"num_minibatches": 2},
    ),
    right("a large constant in the loss", "ready step", with_constant, nnx=False),
    right("contrastive, all_gather", "ready: statistic", losses.contrastive(DP), nnx=False),
    right("contrastive in both directions, all_gather", "ready: statistic", losses.two_sided(XY), mesh="tuple"),
    right("covariance, pmean", "ready: statistic", losses.covariance(DP), nnx=False),
    right("advantages, pmean", "ready: statistic", losses.advantages(DP), nnx=False),
    right("standardised outputs, pmean", "ready: statistic", losses.standardised(DP), nnx=False),
    right(
        "loss averaged by pmean, types off",
        "ready step",
        lambda *args: lax.pmean(losses.mean(*args), DP),
        check_vma=(False,),
        nnx=False,
    ),
]

# Words that the findings must contain.
SUM = r"sum|divided|global batch"
STATISTIC = r"statistic|no mean|not a mean|not the mean|all_gather|minibatch|normalis"
WEIGHT = r"weight"
ZERO = r"zero|no gradient|none|all 0|\b0 x"
REFUSED = "does not vary over"
REDUCED = r"psum|pmean|reduced|summed|divided"


def _statistic(name: str, loss: Any, **more: Any) -> Entry:
    return wrong(name, "ready: statistic", loss=loss, names=STATISTIC, **more)


def with_stopped(params: Any, apply_fn: Any, batch: Any, rng: Any) -> jax.Array:
    """Returns a step that stops the gradient of the first layers by mistake, instead of a target's gradient."""
    stopped = {
        name: leaf if "2" in name or "head" in name else lax.stop_gradient(leaf) for name, leaf in params.items()
    }
    return losses.mean(stopped, apply_fn, batch, rng)


def two_heads(params: Any, apply_fn: Any, batch: Any, rng: Any, of_extra: float = 0.5) -> jax.Array:
    main, extra = losses.outputs(params, apply_fn, batch, rng)
    loss = optax.softmax_cross_entropy_with_integer_labels(main, batch["y"]).mean()
    return loss + of_extra * jnp.mean((extra - batch["target"]) ** 2) if of_extra else loss


def one_device_only(*args: Any) -> jax.Array:
    return jnp.where(lax.axis_index(DP) == 0, losses.mean(*args), 0 * losses.mean(*args))


def stopped_norm(z: jax.Array, batch: Any) -> jax.Array:
    """Divides the loss by the scale of all local outputs, without a gradient through the scale."""
    return jnp.mean((z - batch["target"]) ** 2) / lax.stop_gradient(jnp.std(z) + 1e-3)


WRONG = [
    wrong("sum over rows", "ready: sum", loss=losses.of_rows(jnp.sum), names=SUM),
    wrong("sum over rows, one axis", "ready: sum", loss=losses.of_rows(jnp.sum), mesh="fsdp", names=SUM, nnx=False),
    wrong(
        "sum over rows, minibatches",
        "ready: sum",
        loss=losses.of_rows(jnp.sum),
        options={"num_minibatches": 2},
        names=SUM,
    ),
    wrong("sum of tokens, tied table", "ready: sum", loss=losses.tokens_sum, model="tied", mesh="fsdp", names=SUM),
    wrong("sum, attention", "ready: sum", loss=losses.of_rows(jnp.sum), model="attention", names=SUM),
    wrong("sum, scan and remat", "ready: sum", loss=losses.of_rows(jnp.sum), model="scan", names=SUM),
    wrong("sum, batch_stats", "ready: sum", loss=losses.sum_stats, model="stats", names=SUM),
    wrong(
        "sum, noise from rng",
        "ready: sum",
        loss=losses.diffusion(reduce=jnp.sum),
        without_draws=losses.diffusion(False, jnp.sum),
        model="denoiser",
        names=SUM,
    ),
    wrong("sum, bfloat16", "ready: sum", loss=losses.of_rows(jnp.sum), model="bfloat16", mesh="tuple", names=SUM),
    wrong("divided by the global batch", "ready: sum", loss=losses.of_rows(lambda x: x.sum() / 32), names=SUM),
    wrong(
        "divided by the number of devices",
        "ready: sum",
        loss=lambda *args: losses.mean(*args) / lax.axis_size(DP),
        names=SUM,
        nnx=False,
    ),
    wrong(
        "pmean in the loss, types on",
        "ready: reduced",
        check_vma=(True,),
        names=REDUCED,
        refused=REFUSED,
        loss=lambda *args: lax.pmean(losses.mean(*args), DP),
    ),
    wrong(
        "psum in the loss",
        "ready: reduced",
        names=REDUCED,
        refused=REFUSED,
        loss=lambda *args: lax.psum(losses.mean(*args), DP),
    ),
    wrong(
        "psum over one axis in the loss",
        "ready: reduced",
        names=REDUCED,
        refused=REFUSED,
        nnx=False,
        loss=lambda *args: lax.psum(losses.mean(*args), "dp"),
    ),
    wrong("mean of a mask on each device", "ready: weights", loss=losses.masked_mean, names=WEIGHT),
    wrong(
        "mean of a mask, a large constant",
        "ready: weights",
        names=WEIGHT,
        nnx=False,
        loss=lambda *args: 1e3 + losses.masked_mean(*args),
    ),
    wrong(
        "a mean for a sum, weighted=True",
        "ready: weights",
        loss=losses.mean_as_sum,
        options={"weighted": True},
        names=WEIGHT + "|" + SUM,
    ),
    wrong("loss closes over parameters", "ready: no gradient", make=closes_over, names=ZERO),
    wrong(
        "stop_gradient on the outputs",
        "ready: no gradient",
        truth=losses.mean,
        names=ZERO,
        loss=lambda *args: lax.stop_gradient(losses.mean(*args)) + 0 * losses.mean(*args),
        nnx=False,
    ),
    wrong(
        "stop_gradient on all parameters",
        "ready: no gradient",
        truth=losses.mean,
        names=ZERO,
        loss=lambda params, *rest: losses.mean(lax.stop_gradient(params), *rest),
    ),
    wrong("stop_gradient on the first layers", "ready: no gradient", loss=with_stopped, truth=losses.mean, names=ZERO),
    wrong(
        "a head that no loss uses",
        "ready: no gradient",
        model="extra_head",
        names=ZERO,
        truth=two_heads,
        loss=functools.partial(two_heads, of_extra=0.0),
    ),
    wrong("one device only", "ready: other", loss=one_device_only, nnx=False),
    _statistic("contrastive, negatives of the device", losses.contrastive()),
    _statistic("contrastive in both directions", losses.two_sided(), mesh="fsdp", nnx=False),
    _statistic("covariance", losses.covariance()),
    _statistic("normalised advantages", losses.advantages()),
    _statistic("hard examples", losses.hard_examples),
    _statistic("root mean square", losses.root_mean_square),
    _statistic("standardised outputs", losses.standardised(), nnx=False),
    _statistic("the worst row", losses.worst_row, nnx=False),
    _statistic("soft maximum over rows", losses.soft_worst, nnx=False),
    _statistic("median", losses.median, nnx=False),
    _statistic("mean and variance of losses", losses.spread, nnx=False),
    _statistic("entropy of the mean prediction", losses.marginal_entropy, nnx=False),
    _statistic("dice", losses.of_outputs(losses.dice), mesh="tuple", nnx=False),
    _statistic("ranking of pairs", losses.of_outputs(losses.ranking), mesh="copies", nnx=False),
    _statistic("divided by the outputs' scale", losses.of_outputs(stopped_norm), nnx=False),
    _statistic("layers normalised by the rows at hand", losses.mean, model="of_rows"),
    _statistic("last row dropped", losses.of_rows(lambda x: x[:-1].mean()), nnx=False),
    _statistic("first row twice", losses.of_rows(lambda x: jnp.concatenate([x, x[:1]]).mean()), nnx=False),
    _statistic(
        "contrastive, all_gather, minibatches", losses.contrastive(DP), options={"num_minibatches": 2}, nnx=False
    ),
    _statistic("root mean square, minibatches", losses.root_mean_square, options={"num_minibatches": 2}, nnx=False),
    _statistic("advantages, pmean, minibatches", losses.advantages(DP), options={"num_minibatches": 2}, nnx=False),
]

EXPERTS = right("experts split over an axis of the batch", "ready: experts", model="split_experts", mesh="experts")

ENTRIES = [*RIGHT, *WRONG, EXPERTS]  # The settings of a round depend on the order.
