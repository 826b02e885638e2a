"""Tests of the step-time benchmark in small: equivalent cases alternate and are printed; PyTorch has our model."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.progress import Progress

from benchmarks import step_time, torch_processes
from benchmarks.step_time_variants import CASES, MODELS, build, start_of, workload

MODEL = MODELS["tiny"]
CHOSEN = ["jit", "flat", "ours, gathered again"]
ROUNDS = 2
PROCESSES = 2


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step_time")
    options = ["--model", "tiny", "--rounds", str(ROUNDS), "--steps", "1", "--out", str(folder)]
    assert step_time.main([*options, "--cases", *CHOSEN]) == 0
    return folder


@pytest.mark.slow
def test_step_time_cases_have_equal_losses(out):
    losses = {case: found["losses"] for case, found in json.loads((out / "tiny.json").read_text())["cases"].items()}
    assert list(losses) == CHOSEN
    for found in losses.values():
        np.testing.assert_allclose(found[0], losses["jit"][0], rtol=1e-5)
        np.testing.assert_allclose(found[1], losses["jit"][1], rtol=1e-4)
    assert losses["jit"][1] < losses["jit"][0] - 0.01  # guard: the first step has changed the model


def test_step_time_json_has_every_round_and_ratios_within_the_same_round(out):
    found = json.loads((out / "tiny.json").read_text())
    assert found["tokens_per_step"] == 8 * MODEL.context and found["devices"].startswith("8 x")
    assert {"jax", "flax"} <= found["versions"].keys()
    seconds = {case: np.array(one["seconds_per_step"]["rounds"]) for case, one in found["cases"].items()}
    for case, one in found["cases"].items():
        assert seconds[case].shape == (ROUNDS,) and (seconds[case] > 0).all()
        assert one["ratios"]["time over jit"]["median"] == pytest.approx(np.median(seconds[case] / seconds["jit"]))
        assert one["tokens_per_second"] == pytest.approx(found["tokens_per_step"] / np.median(seconds[case]))
    assert found["cases"]["jit"]["ratios"]["time over jit"] == {"low": 1, "median": 1, "high": 1}


def test_step_time_redraw_prints_and_draws_stored_results_or_exits_with_2(out, tmp_path, capsys):
    assert step_time.main(["--model", "tiny", "--out", str(tmp_path), "--redraw"]) == 2
    assert "there is no" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "tiny.json").write_text((out / "tiny.json").read_text())
    assert step_time.main(["--model", "tiny", "--out", str(tmp_path), "--redraw"]) == 0
    shown = capsys.readouterr().out
    for text in (*CHOSEN, "of jit", "tokens/s", "aim, at most 0.9 x the time of jit: ours, gathered again: "):
        assert text in " ".join(shown.split())
    assert (tmp_path / "tiny.png").stat().st_size > 10_000


def test_take_turns_rotates_the_first_case_and_reverses_every_second_round():
    turns = []
    runs = {case: lambda steps, case=case: turns.append((case, steps)) or 0.0 for case in "abc"}
    seconds = step_time.take_turns(runs, 4, 5, lambda text: None)
    assert "".join(case for case, _ in turns) == "abc" + "acb" + "cab" + "cba"
    assert {steps for _, steps in turns} == {5} and all(found.shape == (4,) for found in seconds.values())


def test_check_same_losses_raises_for_a_case_with_other_losses():
    losses = {"jit": [5.0, 4.9], "ours": [5.0, 4.9001], "flat": [5.0, 4.8]}
    step_time.check_same_losses({case: losses[case] for case in ("jit", "ours")}, 1e-4)
    with pytest.raises(
        ValueError, match=r"flat does other work than jit: .* \[5.0, 4.8\], those of jit are \[5.0, 4.9\]"
    ):
        step_time.check_same_losses(losses, 1e-4)
    with pytest.raises(ValueError, match="no case is left"):
        step_time.check_same_losses({}, 1e-4)


def test_build_raises_for_hsdp_on_a_single_device():
    with pytest.raises(ValueError, match=r"shape=\(1,\) has only one"):
        build(MODEL, CASES["ours, HSDP"], jax.devices()[:1])


def test_decoder_step_time_cases_use_remat_and_build_raises_for_hand_written_fsdp():
    decoder = MODELS["decoder"]
    assert step_time.bases_of(["jit, remat", "ours, remat"]) == ["jit, remat"]
    assert step_time.bases_of(["jit", "jit, remat"]) == ["jit"]
    for case in ("jit, remat", "ours, remat"):
        step, arguments = build(decoder, CASES[case], jax.devices())
        assert "remat" in str(step.trace(*arguments).jaxpr)
        assert decoder.init_failure(case) is None
    with pytest.raises(ValueError, match="FSDP by hand wraps modules in their source"):
        build(decoder, CASES["flat"], jax.devices())
    assert str(decoder.init_failure("flat")).startswith("FSDP by hand wraps modules in their source")
    assert str(decoder.init_failure("FSDP2")).startswith("PyTorch has the Transformer alone")
    assert not any(map(MODEL.init_failure, [*CASES, "FSDP2"]))


# -------------------------------------------------------------------------------------------------------------- PyTorch


@pytest.mark.skipif(torch_processes.is_installed(), reason="torch is installed")
def test_step_time_without_torch_leaves_out_fsdp2_with_an_install_hint():
    with Progress(disable=True) as progress:
        found = step_time.measure(MODEL, ["replicated", "FSDP2"], 1, 1, progress, devices=jax.devices()[:1])
    assert list(found["cases"]) == ["replicated"] and "torch" not in found["versions"]
    assert step_time.remarks(found) == ["FSDP2 is left out: torch is not installed. pip install -e .[torch]"]


def test_pytorch_model_has_the_logits_of_the_flax_model():
    torch_fsdp = pytest.importorskip("benchmarks.torch_fsdp", reason="torch is not installed", exc_type=ImportError)
    start, model = start_of(MODEL, 2), workload(MODEL, 2).model
    tokens = start.tokens[:, :-1]
    want = np.asarray(jax.jit(model.apply)({"params": nested(start.params)}, tokens))
    given = torch_fsdp.torch.from_numpy(tokens).long()

    def logits(params, heads):
        with torch_fsdp.torch.no_grad():
            return torch_fsdp.model_of(params, heads)(given).numpy()

    np.testing.assert_allclose(logits(start.params, MODEL.size.heads), want, atol=1e-4)
    assert np.abs(want).max() > 0.1
    # Guards: attention counts, and so does every parameter.
    assert not np.allclose(logits(start.params, 1), want, atol=1e-3)
    for path, value in start.params.items():
        assert not np.allclose(logits(start.params | {path: value * 1.5}, MODEL.size.heads), want, atol=1e-3), path


def test_pytorch_fsdp2_processes_have_the_losses_of_jit():
    pytest.importorskip("torch")
    cases = ["jit", *step_time.TORCH_CASES]
    with Progress(disable=True) as progress:
        found = step_time.measure(MODEL, cases, 1, 1, progress, devices=jax.devices()[:PROCESSES])
    assert list(found["cases"]) == cases and "torch" in found["versions"]
    for one in found["cases"].values():
        np.testing.assert_allclose(one["losses"], found["cases"]["jit"]["losses"], rtol=1e-4)
    assert found["cases"]["jit"]["ratios"].keys() == {"time over jit", "time over FSDP2"}
    assert not children()


def test_pytorch_processes_end_after_an_error():
    pytest.importorskip("torch")
    start, told = start_of(MODEL, PROCESSES), "process . of PyTorch has ended with exit code 1: .*unflatten"
    arguments = (PROCESSES, start.params, 3, start.tokens)  # 3 heads do not divide the width
    with torch_processes.torch_processes(*arguments, lifetime_s=120) as (run, _):
        assert len(children()) == PROCESSES
        with pytest.raises(RuntimeError, match=told):
            run("FSDP2", 1)
    assert not children()


def nested(params):
    """Returns nested dicts: {"a/b": x} -> {"a": {"b": x}}."""
    found = {}
    for path, value in params.items():
        *modules, name = path.split("/")
        inner = found
        for module in modules:
            inner = inner.setdefault(module, {})
        inner[name] = value
    return found


def children():
    """Returns the running PyTorch processes that this process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue  # the process has ended meanwhile
        found += [path.parent.name] * (parent == os.getpid() and b"benchmarks.torch_fsdp" in command)
    return found
