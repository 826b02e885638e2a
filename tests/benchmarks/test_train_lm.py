"""Tests of the training job: models follow the mathematics, text is split fairly, sharding keeps the loss curve."""

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks import fitting, models, text, train_lm
from benchmarks.job import _with_folders, prepare
from benchmarks.models import LanguageModel, chunkwise_mlstm
from benchmarks.run_log import read_rows
from tests.support import assert_each_leaf
from xlstm_jax.distributed import shard_module_params, unbox
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.resilience.watchdog import Watchdog

TINY = train_lm.TrainConfig(
    steps=6,
    batch_size=8,
    context=32,
    d_model=16,
    layers=2,
    heads=2,
    min_weight_size=64,
    log_every=1,
    eval_every=3,
    sample_bytes=0,
    checkpoint_every=0,
)


# --------------------------------------------------------------------------------------------------------------- models


def mlstm_step_by_step(q, k, v, i_gate, log_f):
    """The recurrence of arXiv 2405.04517, equations 19 to 27, without stabiliser and without chunks, in float64."""
    b, h, t, d = q.shape
    memory, normaliser = np.zeros((b, h, d, v.shape[-1])), np.zeros((b, h, d))
    out = []
    for s in range(t):
        forget, write = np.exp(log_f[:, :, s]), np.exp(i_gate[:, :, s])
        memory = forget[..., None, None] * memory
        memory += write[..., None, None] * k[:, :, s, :, None] * v[:, :, s, None, :]
        normaliser = forget[..., None] * normaliser + write[..., None] * k[:, :, s]
        overlap = np.abs(np.einsum("bhd,bhd->bh", normaliser, q[:, :, s]))
        out.append(np.einsum("bhde,bhd->bhe", memory, q[:, :, s]) / np.maximum(overlap, 1)[..., None])
    return np.stack(out, axis=2)


def mlstm_inputs(length, input_gate_scale=2.0):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 2, 3, length, 4))
    v = rng.normal(size=(2, 3, length, 5))
    i_gate = input_gate_scale * rng.normal(size=(2, 3, length))
    log_f = -np.logaddexp(0, -rng.normal(2.0, 2.0, size=(2, 3, length)))  # log sigmoid
    return q, k, v, i_gate, log_f


@pytest.mark.one_in(3)
@pytest.mark.parametrize("chunk_size", [1, 4, 7, 24, 64])
def test_chunkwise_mlstm_equals_the_step_by_step_recurrence(chunk_size):
    inputs = mlstm_inputs(24)
    want = mlstm_step_by_step(*inputs)
    with jax.enable_x64(True):
        got = chunkwise_mlstm(*map(jnp.asarray, inputs), chunk_size=chunk_size)
    assert got.dtype == np.float64
    assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    # Guard: the second half depends on the first, so chunks that pass on no memory would fail above.
    without_memory = mlstm_step_by_step(*(x[:, :, 12:] for x in inputs))
    assert not np.allclose(without_memory, want[:, :, 12:], rtol=0.1)


def test_chunkwise_mlstm_is_stable_where_the_exponential_gate_overflows_float32():
    inputs = mlstm_inputs(24, input_gate_scale=150.0)
    assert inputs[3].max() > np.log(np.finfo(np.float32).max)  # guard: overflows without a stabiliser
    got = chunkwise_mlstm(*(jnp.asarray(x, jnp.float32) for x in inputs), chunk_size=8)
    assert_allclose(got, mlstm_step_by_step(*inputs), rtol=1e-3, atol=1e-4)


def test_chunkwise_mlstm_gradients_equal_finite_differences_of_the_recurrence():
    inputs = mlstm_inputs(12)
    directions = [np.random.default_rng(1).normal(size=x.shape) for x in inputs]
    steps = [mlstm_step_by_step(*(x + e * d for x, d in zip(inputs, directions, strict=True))) for e in (1e-6, -1e-6)]
    with jax.enable_x64(True):
        _, got = jax.jvp(lambda *x: chunkwise_mlstm(*x, chunk_size=4), inputs, tuple(directions))
    assert_allclose(got, (steps[0] - steps[1]) / 2e-6, rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("i_gate, log_f", [(-120.0, -120.0), (120.0, -120.0), (120.0, -0.1), (0.0, -1000.0)])
def test_chunkwise_mlstm_has_finite_gradients_with_gates_wide_open_or_shut(i_gate, log_f):
    q, k, v, gate, _ = (jnp.asarray(x, jnp.float32) for x in mlstm_inputs(24))
    gates = jnp.full_like(gate, i_gate), jnp.full_like(gate, log_f)
    grads = jax.grad(lambda *x: jnp.sum(chunkwise_mlstm(*x, chunk_size=8) ** 2), range(5))(q, k, v, *gates)
    for name, grad in zip(("q", "k", "v", "i_gate", "log_f"), grads, strict=True):
        assert np.isfinite(grad).all(), f"the gradient of {name} has entries that are not finite"


def small_model(block, **kwargs):
    return LanguageModel(block, dim=16, num_layers=2, num_heads=2, **kwargs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("block", models.BLOCKS)
def test_a_later_byte_does_not_change_earlier_logits(block, monkeypatch):
    monkeypatch.setattr(models, "CHUNK_SIZE", 8)
    model, tokens = small_model(block), jax.random.randint(jax.random.key(1), (2, 20), 0, 256)
    variables, apply = jax.jit(model.init)(jax.random.key(0), tokens), jax.jit(model.apply)
    before, after = apply(variables, tokens), apply(variables, tokens.at[:, 13].add(1) % 256)
    assert_array_equal(after[:, :13], before[:, :13])
    assert np.all(np.abs(after[:, 13:] - before[:, 13:]).max(-1) > 0)  # guard: every later step changes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("block", models.BLOCKS)
def test_wrapping_and_remat_leave_parameter_names_shapes_and_values_unchanged(block):
    def wrap(module):
        return shard_module_params(module, "fsdp", min_weight_size=64)

    tokens = jnp.zeros((2, 8), jnp.int32)
    plain = jax.jit(small_model(block).init)(jax.random.key(0), tokens)
    wrapped = jax.jit(small_model(block, wrap=wrap, remat=True).init)(jax.random.key(0), tokens)
    assert jax.tree.structure(plain) == jax.tree.structure(wrapped)
    assert_each_leaf(assert_array_equal, plain, wrapped)


def test_dropout_is_random_in_training_only():
    model, tokens = small_model("xlstm", dropout=0.5), jnp.zeros((1, 8), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    train = jax.jit(lambda key: model.apply(variables, tokens, train=True, rngs={"dropout": key}))
    assert not np.allclose(train(jax.random.key(1)), train(jax.random.key(2)))
    without = small_model("xlstm")
    assert_array_equal(jax.jit(model.apply)(variables, tokens), jax.jit(without.apply)(variables, tokens))


# ----------------------------------------------------------------------------------------------------------------- text


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns a folder of 40 different files, and files that must be skipped: a binary, a hidden file, a copy."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"file {i:02} says: " + "the cat sat on the mat. " * 40)
    (folder / "image.bin").write_bytes(b"\x00\xff" * 100)
    (folder / ".hidden").write_text("hidden")
    (folder / "copy.txt").write_text((folder / "00.txt").read_text())
    return folder


def test_load_text_holds_out_the_same_complete_files_on_every_call(corpus):
    first, second = text.load_text([corpus]), text.load_text([corpus])
    assert_array_equal(first.held_out, second.held_out)
    train, held_out = ({part[:8] for part in x.tobytes().split(b"\0")[:-1]} for x in (first.train, first.held_out))
    assert len(held_out) == 2 and len(train) == 38 and not train & held_out
    assert "40 files" in first.summary and "2 whole files" in first.summary


def test_load_text_of_a_single_file_holds_out_the_end(corpus):
    split = text.load_text([corpus / "01.txt"])
    whole = (corpus / "01.txt").read_bytes()
    assert split.train.tobytes()[:-1] + split.held_out.tobytes()[:-1] == whole
    assert len(split.held_out) == pytest.approx(0.05 * len(whole), abs=2)


def test_load_text_defaults_to_the_python_standard_library():
    split = text.load_text()
    assert len(split.train) > 5e6 and 0.02 < len(split.held_out) / len(split.train) < 0.15


def test_random_windows_are_contiguous_text_pieces_and_follow_the_seed():
    data = np.arange(200, dtype=np.uint8)
    windows = text.random_windows(data, 6, 9, seed=(0, 1))
    assert windows.shape == (6, 10) and np.all(np.diff(windows, axis=1) == 1)
    assert_array_equal(windows, text.random_windows(data, 6, 9, seed=(0, 1)))
    assert not np.array_equal(windows, text.random_windows(data, 6, 9, seed=(0, 2)))
    fixed = text.fixed_windows(data, 5, 9)
    assert fixed[0, 0] == 0 and fixed[-1, -1] == 199


def test_byte_frequency_loss_equals_the_entropy_of_the_bytes():
    data = np.repeat(np.array([65, 66], np.uint8), 100_000)
    assert text.byte_frequency_loss(data, data) == pytest.approx(np.log(2), rel=2e-2)
    assert text.byte_frequency_loss(data, np.array([7], np.uint8)) == pytest.approx(np.log(200_256))


# ------------------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Returns a function: ``runs(steps=9)`` trains TINY with the change, once per set of changes."""
    done = {}

    def run(**changes):
        config = dataclasses.replace(TINY, data=(str(corpus),), **changes)
        key = repr(config)
        if key not in done:
            out = tmp_path_factory.mktemp("run")
            done[key] = train_lm.train(dataclasses.replace(config, out=str(out)))
        return done[key]

    return run


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", [None, {"dp": 2, "fsdp_x": 2, "fsdp_y": 2}], ids=str)
def test_sharded_training_has_the_loss_curve_of_replicated_training(runs, mesh):
    sharded, replicated = runs(mesh=mesh), runs(replicated=True)
    assert_allclose(sharded.losses, replicated.losses, rtol=2e-5)
    assert sharded.held_out_loss == pytest.approx(replicated.held_out_loss, rel=2e-5)
    assert replicated.losses[-1] < replicated.losses[0] - 0.01  # guard: the loss decreases
    here, whole = sharded.memory.values()
    assert sum(here.values()) < 0.5 * sum(whole.values())
    assert len(set(map(str, replicated.memory.values()))) == 1


@pytest.mark.slow
def test_remat_minibatches_ema_and_log_every_leave_the_training_losses_unchanged(runs, corpus, capsys):
    every = runs()
    fourth = runs(mesh={"fsdp": 4}, remat=True, num_minibatches=2, ema=0.9, log_every=4)
    assert [row["step"] for row in fourth.rows] == [3, 4, 6]  # the evaluations after steps 3 and 6 end a row too
    means = [np.mean(every.losses[:3]), every.losses[3], np.mean(every.losses[4:])]
    assert_allclose(fourth.losses, means, rtol=2e-5)
    assert fourth.rows[-1]["averaged_held_out_loss"] == pytest.approx(fourth.held_out_loss, rel=0.05)
    assert fourth.rows[-1]["averaged_held_out_loss"] != fourth.held_out_loss
    # Another run does not overwrite the folder.
    assert train_lm.main(["--steps", "1", "--data", str(corpus), "--out", str(fourth.out)]) == 2
    assert "metrics.csv holds the metrics of a run" in capsys.readouterr().err


def test_trained_model_beats_the_byte_frequency_loss_and_writes_a_sample(runs):
    result = runs(model="transformer", steps=60, lr=2e-2, mesh={"fsdp": 1}, eval_every=60, sample_bytes=8)
    assert len(result.sample) == len(train_lm.SAMPLE_PROMPT) + 8
    assert result.held_out_loss < 0.8 * result.baseline


def test_training_run_writes_metrics_config_and_pictures(runs):
    result = runs()
    with (result.out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, TINY.steps + 1))
    assert_array_equal([np.float32(row["loss"]) for row in rows], np.float32(result.losses))
    assert_allclose([float(row["perplexity"]) for row in rows], np.exp(result.losses), rtol=1e-6)
    assert [int(float(row["tokens"])) for row in rows] == [8 * 32] * TINY.steps
    assert [bool(row["held_out_loss"]) for row in rows] == [False, False, True, False, False, True]
    assert json.loads((result.out / "config.json").read_text())["mesh"] == {"fsdp": 8}
    for picture in ("loss.png", "memory.png"):
        assert (result.out / picture).read_bytes().startswith(b"\x89PNG")


# ----------------------------------------------------------------------------------------------- checkpoints, processes


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """Returns an uninterrupted run with checkpoints, and its config."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    config = dataclasses.replace(
        TINY,
        model="transformer",
        data=(str(corpus),),
        checkpoint_dir=str(folder),
        checkpoint_every=2,
        log_every=3,
        dropout=0.1,
    )
    return train_lm.train(config), config


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh, exact", [({"fsdp": 8}, True), ({"dp": 2, "fsdp": 2}, False)], ids=str)
def test_resumed_run_has_the_same_rows_as_an_uninterrupted_run(undisturbed, tmp_path, mesh, exact):
    want, config = undisturbed
    folder = shutil.copytree(config.checkpoint_dir, tmp_path / "again")
    for step in (4, 6):  # emulates a kill after step 3, between two rows
        shutil.rmtree(folder / "steps" / str(step))
    config = dataclasses.replace(config, checkpoint_dir=str(folder), resume=True)
    resumed = train_lm.train(dataclasses.replace(config, mesh=mesh))
    assert [row["step"] for row in resumed.rows] == [row["step"] for row in want.rows] == [3, 6]
    if exact:
        assert resumed.losses == want.losses and resumed.held_out_loss == want.held_out_loss
    else:
        # Not exact: from the resumed step on, other devices draw other dropout masks.
        assert_allclose(resumed.losses, want.losses, rtol=0.02)


SMALLEST = "--batch-size 2 --mesh fsdp=1 --context 8 --d-model 8 --layers 1 --heads 1 --model transformer"


@pytest.mark.slow
def test_run_stopped_by_sigterm_continues_with_the_printed_options(monkeypatch, corpus, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_lm.LoopGuard, "should_stop", lambda self, step: step == 2)
    limits, of_saves = [], []
    watch, check = Watchdog.watch, fitting.check_replicas
    monkeypatch.setattr(Watchdog, "watch", lambda self, what, s: (limits.append((what, s)), watch(self, what, s))[1])
    monkeypatch.setattr(fitting, "check_replicas", lambda state: (of_saves.append(limits[-1][1]), check(state)))

    given = f"{SMALLEST} --steps 3 --sample-bytes 0 --checkpoint-every 1 --step-timeout 60 --data {corpus}".split()
    assert train_lm.main(given) == train_lm.EXIT_STOPPED
    pattern = r"stopped after step 2 by SIGTERM; go on with (--out runs/transformer-\d+-\d+ --resume)$"
    options = re.search(pattern, capsys.readouterr().out, re.MULTILINE)[1]
    assert train_lm.main([*given, *options.split()]) == 0
    assert "going on after step 2" in capsys.readouterr().out
    (metrics,) = tmp_path.glob("runs/*/metrics.csv")
    assert [row["step"] for row in read_rows(metrics.parent)] == [3]
    assert train_lm.main([*given, *options.split()]) == 0  # no steps are left
    assert [row["step"] for row in read_rows(metrics.parent)] == [3]

    # The first save compiles and is timed separately; later saves belong to a step's time.
    assert of_saves == [fitting.FIRST_SAVE_S, 60, fitting.FIRST_SAVE_S]
    assert ("step 2", 60) in limits and ("step 3", 60) in limits


@pytest.mark.parametrize(
    "folders, want",
    [
        ({"out": "a b"}, "go on with --out 'a b' --resume"),
        ({"checkpoint_dir": "c"}, "go on with --checkpoint-dir c --resume"),
        ({"checkpoint_dir": "c", "out": "o"}, "go on with --checkpoint-dir c --out o --resume"),
        ({"checkpoint_every": 0}, "and with --checkpoint-every 0 these 7 steps are lost. Leave that option out"),
    ],
    ids=str,
)
def test_how_to_go_on_after_sigterm_names_the_folders_or_the_lost_steps(folders, want):
    config = _with_folders(train_lm.TrainConfig(**folders))
    assert want in train_lm.how_to_go_on(config, 7)


@pytest.mark.slow
def test_two_process_run_has_single_process_losses_and_keeps_a_finished_run(runs, corpus, tmp_path, capsys):
    one = runs()
    sizes = "--steps 6 --batch-size 8 --context 32 --d-model 16 --layers 2 --heads 2 --min-weight-size 64"
    options = "--mesh fsdp=4 --log-every 1 --eval-every 3 --sample-bytes 4 --generate 2 --generate-gather once"
    arguments = [*sizes.split(), *options.split(), "--data", str(corpus), "--checkpoint-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "benchmarks.train_lm", *arguments, "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "on 4 cpu devices (cpu) of 2 processes" in " ".join(done.stdout.split())
    for shown in ("sharded, fsdp=4", "a whole copy", "byte frequencies", "a sample"):
        assert shown in done.stdout
    assert done.stdout.count("held-out text, and how the model goes on") == 2
    rows = read_rows(tmp_path / "run/metrics")
    assert_allclose([row["loss"] for row in rows], one.losses, rtol=2e-5)
    assert exit_code(arguments) == 2 and "Go on with it by --resume" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- command line


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mesh", "fsdp"], r"argument --mesh: 'fsdp': .* Write it as dp=2,fsdp=4"),
        (["--mesh", "fsdp=2,fsdp=4"], "'fsdp=4' is not a new axis"),
        (["--mesh", "fsdp=16"], "takes 16 devices, and there are 8"),
        (["--mesh", "dp=8"], "no axis named fsdp.* give --replicated"),
        (["--data", "no/such/file"], "--data no/such/file: no such file or folder"),
        (["--data", "{empty}"], "no text in it. Name a file"),
        (["--data", "{binary}"], "image.bin: not UTF-8 text"),
        (["--context", "4000", "--data", "{short}"], "context=4000 needs 4001 bytes, and this text has"),
        (["--batch-size", "12"], "8 devices . 1 minibatches = 8 do not divide it. Take 16"),
        (["--d-model", "100", "--heads", "8"], "--d-model 100: must be a multiple of 2 . --heads = 16"),
        (["--resume"], "--resume: from which checkpoints. Give --checkpoint-dir, or --out"),
        (
            ["--resume", "--out", "x", "--checkpoint-every", "0"],
            "--resume: needs checkpoints, and --checkpoint-every 0",
        ),
        (["--out", "{run}"], "--out .*run: holds the checkpoints of a run. Go on with it by --resume"),
        (["--checkpoint-dir", "{run}"], "--checkpoint-dir .*run: holds the checkpoints of a run"),
        (["--checkpoint-dir", "gs://bucket/run"], "--checkpoint-dir gs://bucket/run: is a URL. Give a folder"),
        (["--ema", "1"], r"--ema 1\.0: a decay is at least 0, for no average, and less than 1"),
        (["--steps", "0"], "argument --steps: '0' is not a positive integer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_option_gives_a_single_line_error_and_exit_code_2(arguments, message, corpus, tmp_path, capsys):
    (tmp_path / "run" / "steps" / "100").mkdir(parents=True)
    paths = {
        "run": tmp_path / "run",
        "empty": tmp_path / "run",
        "binary": corpus / "image.bin",
        "short": corpus / "01.txt",
    }
    assert exit_code([a.format(**paths) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


def test_diverging_training_exits_with_1_and_reports_non_finite_steps(corpus, tmp_path, capsys):
    tiny = "--steps 20 --batch-size 2 --mesh fsdp=1 --context 8 --d-model 8 --layers 1 --heads 1 --model transformer"
    assert train_lm.main([*tiny.split(), "--lr", "1e30", "--data", str(corpus), "--out", str(tmp_path)]) == 1
    assert "the loss or a gradient was not finite in 11 steps in a row" in capsys.readouterr().err


def exit_code(arguments):
    try:
        return train_lm.main(arguments)
    except SystemExit as stop:
        return stop.code


def test_train_lm_help_lists_every_option(capsys):
    assert exit_code(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in train_lm.TrainConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown


@pytest.fixture
def x64_stays_off():
    """Turns float64 off after the test, because the job's option sets JAX's for the rest of the process."""
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.slow
def test_float64_loss_curves_of_sharded_and_replicated_training_agree_to_rounding(runs, x64_stays_off):
    """In float64 sharded and replicated loss curves agree to 1e-12; training magnifies 1e-15 by some factor per step.

    A difference of the algorithm, or of float32's rounding (1e-7 at the first step), would fail.
    """
    options = {"model": "transformer", "dtype": "float64"}
    sharded, replicated = runs(**options), runs(**options, replicated=True)
    assert_allclose(sharded.losses, replicated.losses, rtol=0, atol=1e-12)
    assert replicated.losses[-1] < replicated.losses[0] - 0.01  # guard: the loss decreases


def test_flop_count_of_a_training_step_matches_the_formula_with_and_without_remat(corpus, tmp_path):
    """The FLOP count is the model's, with and without remat.

    Per token: 2 FLOP of a weight forward and 4 backward, and attention's 12 x context x d per layer. The head has 2
    more: its backward pass recomputes the logits, chunk by chunk.
    """
    fields = {"model": "transformer", "d_model": 64, "data": (str(corpus),), "out": str(tmp_path / "run")}

    def found(remat):
        job = prepare(dataclasses.replace(TINY, **fields, remat=remat))
        run = fitting.begin(job, None)
        return run, fitting.traced_step(job, run)[1]

    run, flops = found(remat=False)
    leaves = leaves_with_path(unbox(run.state.params))
    matrices = sum(leaf.size for path, leaf in leaves if "kernel" in path)  # of the embedding nothing is multiplied
    attention, head_again = 2 * 12 * 32 * 64, 2 * 64 * 256
    assert flops == pytest.approx((6 * matrices + attention + head_again) * 32 * 8 / 8, rel=0.02)
    assert found(remat=True)[1] == flops


def test_speed_in_words_reports_the_median_interval():
    assert train_lm.speed_in_words([100.0, 1234.0, 9e9], []) == "1,234 tokens/s"
    assert train_lm.speed_in_words([1234.0], [0.4, 0.5, 0.9]) == "1,234 tokens/s, 50.0% of the chips' peak (MFU)"
