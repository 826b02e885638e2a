"""Tests of safetensors readers: equal bits from a tiny Llama; the page has tables of a single run."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import safetensors_readers as readers
from benchmarks.safetensors_readers import BY_NAME, CASES, ORBAX, OURS, READERS, SMALL
from tests.support import mesh_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and bytes are read from /proc")

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "export.md"
ALONE = {name: case for name, case in CASES.items() if case.processes == 1 and case.cached}


def read_by(reader, folder, llama, case):
    """Returns the target, and the checksums of all shards that a reader has read."""
    target = readers.target_of(llama, case, mesh_of(1, 8))
    names = readers.names_of(llama) if case.mapped else None
    return target, readers.digests(BY_NAME[reader](folder, target, names))


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize("reader", READERS)
def test_all_safetensors_readers_give_reference_checksums_and_detect_a_changed_byte(reader, case, tmp_path):
    """Every reader has the bits of a reference that maps names and layouts by hand; a changed byte is detected."""
    llama = dataclasses.replace(SMALL, tied=ALONE[case].tied)
    readers.write_model(tmp_path / "model", llama, 3)
    target, found = read_by(reader, tmp_path / "model", llama, ALONE[case])
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 3
    assert found == readers.reference(tmp_path / "model", target, llama, ALONE[case])
    assert len(found) == 8 * len(target)

    file = next((tmp_path / "model").glob("*-00002-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    _, other = read_by(reader, tmp_path / "model", llama, ALONE[case])
    assert 0 < sum(found[shard] != other[shard] for shard in found) <= 2


@pytest.mark.parametrize("tied", [False, True])
def test_benchmark_llama_has_the_tensor_names_and_shapes_of_transformers(tied, tmp_path):
    """The benchmark's names and shapes equal transformers'; needs transformers and torch (``make test-models``)."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = {"num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": tied}
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **config))
    theirs.config.save_pretrained(tmp_path)
    llama = readers.llama_of(tmp_path)
    assert llama == dataclasses.replace(SMALL, tied=tied)
    want = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    assert readers.tensors_of(llama) == {name: want[name] for name in want if not (tied and name == "lm_head.weight")}
    assert len(want) == 21


@pytest.mark.slow
def test_readers_command_compares_readers_in_separate_processes(tmp_path, capsys):
    out = tmp_path / "readers.json"
    case = "model, two processes"
    assert readers.main(["--small", "--cases", case, "--repeats", "1", "--files", "2", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    shown = capsys.readouterr().out
    assert kept["versions"].keys() >= {"jax", "safetensors", "orbax-checkpoint"}
    for row in readers.rows_of(kept["cases"][case]):
        assert row[-1] == "yes"
        line = next(line for line in shown.splitlines() if line.strip().startswith(f"{row[0]} "))
        assert line.split()[-len(row) + 1 :] == row[1:]
    for found in kept["cases"][case].values():
        assert found["seconds"] > 0 and found["processor seconds"] > 0 and found["ru_maxrss"] > 1e8
        held = 2 * sum(np.prod(shape) for shape in readers.leaves_of(SMALL).values())
        assert found["bytes of the arrays"] == held / 2  # each process holds half of the shards, in bfloat16
    assert_odd_files_are_answered(kept["odd files"])


def test_malformed_safetensors_files_are_rejected_by_the_library_and_listed_for_orbax():
    assert_odd_files_are_answered(readers.verdicts(mesh_of(1, 8)))


def assert_odd_files_are_answered(odd):
    """Checks that the library rejects every malformed file, and that orbax reads the files listed on the page."""
    assert odd["as written"] == {OURS: "read", ORBAX: "read"}
    good = {"as written", "a file beside it that the index does not name"}
    good |= {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "C64"}
    assert {what for what, answers in odd.items() if answers[OURS] == "read"} == good
    read_by_orbax = {what for what, answers in odd.items() if answers[ORBAX] == "read"}
    assert read_by_orbax - good == {
        "four bytes more",
        "offsets that do not fit the shape",
        "two tensors on the same bytes",
        "an index that names the other file",
        "a tensor that no leaf takes",
        "float32 into bfloat16, which loses bits",
        "float32 into int32, which loses more",
        "a byte of BOOL that is neither 0 nor 1",
    }


def test_summed_up_takes_the_slowest_process_of_a_run_and_the_median_of_runs():
    """A run counts its slowest process, and the result is the median; a wrong or missing shard is an error."""

    def run(*seconds, last=4):
        shards = [{"a 0": 1, "b 0": 2}, {"a 1": 3, "b 1": last}]
        return [{"seconds": s, "digests": part} for s, part in zip(seconds, shards, strict=True)]

    want = {"a 0": 1, "a 1": 3, "b 0": 2, "b 1": 4}
    found = readers.summed_up([run(1, 2), run(9, 3), run(4, 4)], want)
    assert found == {"equal bits": True, "seconds": 4, "all seconds": [2, 9, 4]}
    assert not readers.summed_up([run(1, 2), run(9, 3, last=5), run(4, 4)], want)["equal bits"]
    assert not readers.summed_up([run(1, 2)], want | {"c 0": 5})["equal bits"]


def test_safetensors_page_shows_the_stored_benchmark_rows():
    kept = json.loads(readers.FILE.read_text())
    lines = PAGE.read_text().splitlines()
    assert kept["cases"].keys() == CASES.keys() and kept["model"] == dataclasses.asdict(readers.Llama())
    for case, found in kept["cases"].items():
        for reader, *cells in readers.rows_of(found):
            label = f"`{reader}`" if reader == OURS else reader
            assert f"| {case} | {label} | {' | '.join(cells[:-1])} |" in lines
            assert cells[-1] == "yes"
    assert_odd_files_are_answered(kept["odd files"])
    assert f"orbax-checkpoint {kept['versions']['orbax-checkpoint']}" in PAGE.read_text()
