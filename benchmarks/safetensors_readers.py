"""Cost of reading the safetensors files of a Llama onto a mesh: ``import_safetensors`` compared with orbax's reader.

    python -m benchmarks.safetensors_readers               forty minutes, 6 GB of disk and of memory; Linux
    python -m benchmarks.safetensors_readers --repeats 1 --cases model
    python -m benchmarks.safetensors_readers --checkpoint FOLDER --out out.json      a Llama that transformers has saved

A Llama checkpoint in the layout of transformers (bfloat16, several files with an index) is read onto eight simulated
devices, into a tree of the library: stacked layers, transposed kernels, a separate dim for heads. Since 0.12.2 orbax
reads only the entries that the sharding of its target needs, by the names and in the layout of the file. So orbax reads
each tensor split like the leaf, in the layout of the file, and the name map is applied to the shards in one of two
ways:

  orbax              one ``load`` with default options; the map by ``jax.jit``, leaf by leaf
  orbax, tuned       a ``load`` per leaf, chunks of 4 MiB, 16 MiB of chunks at once; the map by NumPy, on the shard of
                     each device. Of nine further options none took less time with as little memory. (A
                     ``max_over_read_ratio`` of 1.0 took 1.4 to 3 times as long.)

Each reading runs in a separate process (in one case in two processes, each with a separate copy of the files, as on two
hosts). A measurement starts after the start of JAX, orbax and the devices, and ends when every array is ready: seconds,
processor seconds, the peak of resident memory above the memory before and above the arrays (with and without the pages
of mapped files, which the system reclaims under pressure), and bytes read from the disk if the files are not cached.
Readers take turns. The results are medians over repeats and, with two processes, the larger value. Each shard is
compared with the bits that the safetensors library reads.

In addition, damaged files and files that do not fit the target are given to both readers, to see which files are
rejected.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from benchmarks.forecasts import installed_versions
from xlstm_jax.distributed import DeviceMeshManager, import_safetensors, initialize_distributed, simulate_cpu_devices
from xlstm_jax.distributed.checkpoint import Stored
from xlstm_jax.distributed.checkpoint.tensor_names import NameMap, stored_at
from xlstm_jax.formatting import rich_table

DEVICES = 8
AXIS = "fsdp"
OURS, ORBAX, BEST = "import_safetensors", "orbax", "orbax, tuned"
READERS: tuple[str, ...] = OURS, ORBAX, BEST
REFERENCE = "the safetensors library"
FILE = Path(__file__).parent / "results" / "safetensors" / "readers.json"
CHUNK_BYTES, CHUNKS = 4 * 2**20, 4  # options of BEST
SAMPLE_S = 0.005
TIMEOUT_S = 600


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama; by default Llama 3.2 1B with half of its layers. The head is separate unless ``tied``."""

    vocab: int = 128256
    width: int = 2048
    layers: int = 8
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 8192
    tied: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def llama_of(folder: Path) -> Llama:
    """Reads the sizes of a Llama saved by transformers."""
    config = json.loads((folder / "config.json").read_text())
    return Llama(
        vocab=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        hidden=config["intermediate_size"],
        tied=config["tie_word_embeddings"],
    )


SMALL = Llama(vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64)


@dataclass(frozen=True)
class Case:
    """Setting of a measurement: target tree and dtype, page cache or disk, number of processes."""

    mapped: bool = True  # read into the tree of the library; else tensors by their names in the file, split by rows
    dtype: str = "bfloat16"
    tied: bool = False
    cached: bool = True
    processes: int = 1


CASES = {
    "file layout": Case(mapped=False),
    "model": Case(),
    "model, tied": Case(tied=True),
    "model, in float32": Case(dtype="float32"),
    "model, from the disk": Case(cached=False),
    "model, two processes": Case(cached=False, processes=2),
}


# ------------------------------------------------------------------------------------------- the model, in both layouts


def tensors_of(llama: Llama) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of each tensor in the file, as in LlamaForCausalLM of transformers."""
    width, kv_width = llama.width, llama.kv_heads * llama.head_width
    layer = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (llama.hidden, width),
        "mlp.up_proj": (llama.hidden, width),
        "mlp.down_proj": (width, llama.hidden),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    found = {"model.embed_tokens.weight": (llama.vocab, width), "model.norm.weight": (width,)}
    found |= {f"model.layers.{i}.{name}.weight": shape for i in range(llama.layers) for name, shape in layer.items()}
    return found if llama.tied else found | {"lm_head.weight": (llama.vocab, width)}


def leaves_of(llama: Llama) -> dict[str, tuple[int, ...]]:
    """Returns the path and shape of each leaf in the tree of the library; layers are the first dim."""
    width, heads, head_width, layers = llama.width, llama.heads, llama.head_width, llama.layers
    blocks = {
        "q/kernel": (width, heads, head_width),
        "k/kernel": (width, llama.kv_heads, head_width),
        "v/kernel": (width, llama.kv_heads, head_width),
        "out/kernel": (heads, head_width, width),
        "gate/kernel": (width, llama.hidden),
        "up/kernel": (width, llama.hidden),
        "down/kernel": (llama.hidden, width),
        "attention_norm/scale": (width,),
        "mlp_norm/scale": (width,),
    }
    return {
        "embed/embedding": (llama.vocab, width),
        "norm/scale": (width,),
        "head/kernel": (width, llama.vocab),
        **{f"blocks/{name}": (layers, *shape) for name, shape in blocks.items()},
    }


def names_of(llama: Llama) -> NameMap:
    """Returns the map from leaves to tensors; the head of a tied model is the embedding table."""
    layer = "model.layers.{layer}."
    return {
        "embed/embedding": "model.embed_tokens.weight",
        "norm/scale": "model.norm.weight",
        "head/kernel": Stored("model.embed_tokens.weight" if llama.tied else "lm_head.weight", "i o -> o i"),
        r"blocks/(q|k|v)/kernel": Stored(layer + r"self_attn.\1_proj.weight", "d h w -> (h w) d"),
        "blocks/out/kernel": Stored(layer + "self_attn.o_proj.weight", "h w d -> d (h w)"),
        r"blocks/(gate|up|down)/kernel": Stored(layer + r"mlp.\1_proj.weight", "i o -> o i"),
        "blocks/attention_norm/scale": layer + "input_layernorm.weight",
        "blocks/mlp_norm/scale": layer + "post_attention_layernorm.weight",
    }


def write_model(folder: Path, llama: Llama, files: int) -> None:
    """Writes a model with random values with the safetensors library, like ``save_pretrained`` of transformers."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    tensors = tensors_of(llama)
    bytes_in_all = 2 * sum(map(math.prod, tensors.values()))
    groups: list[list[str]] = [[] for _ in range(files)]
    begun = 0
    for name in sorted(tensors):
        groups[begun * files // bytes_in_all].append(name)
        begun += 2 * math.prod(tensors[name])
    where: dict[str, str] = {}
    for i, names in enumerate(group for group in groups if group):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        entries = {}
        for name in names:
            # Without the highest bit of the exponent, every value is finite and below 2.
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            bits = rng.integers(0, 2**16, tensors[name], np.uint16) & 0xBFFF
            entries[name] = bits.view(jnp.bfloat16)
        save_file(entries, folder / file, {"format": "pt"})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": bytes_in_all}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def by_hand(tensors: Mapping[str, np.ndarray], llama: Llama) -> dict[str, np.ndarray]:
    """Converts the tensors of the file to the leaves of the tree by explicit code, as the reference for name maps."""
    width, head_width = llama.width, llama.head_width

    def each(name: str, turned: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return np.stack([turned(tensors[f"model.layers.{i}.{name}.weight"]) for i in range(llama.layers)])

    def of_heads(tensor: np.ndarray) -> np.ndarray:
        return tensor.T.reshape(width, -1, head_width)

    head = tensors["model.embed_tokens.weight" if llama.tied else "lm_head.weight"]
    return {
        "embed/embedding": tensors["model.embed_tokens.weight"],
        "norm/scale": tensors["model.norm.weight"],
        "head/kernel": head.T,
        **{f"blocks/{x}/kernel": each(f"self_attn.{x}_proj", of_heads) for x in "qkv"},
        "blocks/out/kernel": each("self_attn.o_proj", lambda x: x.T.reshape(-1, head_width, width)),
        **{f"blocks/{x}/kernel": each(f"mlp.{x}_proj", np.transpose) for x in ("gate", "up", "down")},
        "blocks/attention_norm/scale": each("input_layernorm", np.asarray),
        "blocks/mlp_norm/scale": each("post_attention_layernorm", np.asarray),
    }


# --------------------------------------------------------------------------------------------------------- the readers


Target = dict[str, jax.ShapeDtypeStruct]


def target_of(llama: Llama, case: Case, mesh: jax.sharding.Mesh) -> Target:
    """Returns the abstract target, split as the library splits: along the largest dim except the layer dim."""

    def split(path: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        first = 1 if path.startswith("blocks/") else 0
        dim = 0 if not case.mapped else max(range(first, len(shape)), key=lambda i: shape[i])
        spec = P(*(AXIS if i == dim else None for i in range(len(shape))))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype), sharding=NamedSharding(mesh, spec))

    leaves = leaves_of(llama) if case.mapped else tensors_of(llama)
    return {path: split(path, shape) for path, shape in leaves.items()}


def by_import_safetensors(folder: Path, target: Target, names: NameMap | None) -> dict[str, jax.Array]:
    return import_safetensors(folder, target, names=names)


def in_the_files_layout(target: Target, names: NameMap | None) -> dict[str, Target]:
    """Returns the abstract tensors that orbax reads for each leaf, split so that a device reads only its shard."""
    found = {}
    for path, like in target.items():
        place = stored_at(path, like.shape, names)
        # The tensor dim that the split dim moves to is found by moving a small array that contains the index along it.
        dim = list(like.sharding.spec).index(AXIS)
        sizes = tuple(DEVICES if i == dim else 2 for i in range(len(like.shape)))
        indices = np.moveaxis(np.broadcast_to(np.arange(DEVICES), (*sizes[:dim], *sizes[dim + 1 :], DEVICES)), -1, dim)
        small = stored_at(path, sizes, names)
        moved = small.to_tensor(indices[0] if small.in_layers else indices)
        spec = P(*(AXIS if np.ptp(moved, axis=i).any() else None for i in range(moved.ndim)))
        abstract = jax.ShapeDtypeStruct(place.shape, like.dtype, sharding=NamedSharding(like.sharding.mesh, spec))
        found[path] = dict.fromkeys(place.tensors, abstract)
    return found


def orbax_load(folder: Path, abstract: Target, **memory: int) -> dict[str, jax.Array]:
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    context.safetensors.read_chunk_bytes = memory.get("chunk_bytes")
    context.memory.read_concurrent_bytes = memory.get("concurrent_bytes")
    with context:
        return ocp.load(str(folder), abstract)


def mapped_by_jit(path: str, like: Any, parts: list[jax.Array], names: NameMap | None) -> jax.Array:
    place = stored_at(path, like.shape, names)

    def to_leaf(parts: list[jax.Array]) -> jax.Array:
        turned = [place.to_leaf(part) for part in parts]
        return jnp.stack(turned) if place.in_layers else turned[0]

    return jax.jit(to_leaf, out_shardings=like.sharding)(parts)


def mapped_by_numpy(path: str, like: Any, parts: list[jax.Array], names: NameMap | None) -> jax.Array:
    local = stored_at(path, like.sharding.shard_shape(like.shape), names)
    of_devices = [{shard.device: shard.data for shard in part.addressable_shards} for part in parts]
    parts.clear()  # the shards of each device are freed after they are mapped

    def of_device(device: Any) -> jax.Array:
        turned = [local.to_leaf(np.asarray(shards.pop(device))) for shards in of_devices]
        shard = np.stack(turned) if local.in_layers else np.ascontiguousarray(turned[0])
        return jax.device_put(shard, device)

    shards = [of_device(device) for device in like.sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def by_orbax(folder: Path, target: Target, names: NameMap | None) -> dict[str, jax.Array]:
    stored = in_the_files_layout(target, names)
    loaded = orbax_load(folder, {name: like for tensors in stored.values() for name, like in tensors.items()})
    if names is None:
        return loaded
    # A tensor is freed after its last leaf, so that the extra memory is that of one leaf.
    needed = [name for tensors in stored.values() for name in tensors]

    def take(name: str) -> jax.Array:
        needed.remove(name)
        return loaded[name] if name in needed else loaded.pop(name)

    return {
        path: mapped_by_jit(path, target[path], [take(name) for name in tensors], names)
        for path, tensors in stored.items()
    }


def by_orbax_at_its_best(folder: Path, target: Target, names: NameMap | None) -> dict[str, jax.Array]:
    memory = {"chunk_bytes": CHUNK_BYTES, "concurrent_bytes": CHUNKS * CHUNK_BYTES}
    if names is None:
        return orbax_load(folder, target, **memory)
    return {
        path: mapped_by_numpy(path, target[path], [*orbax_load(folder, tensors, **memory).values()], names)
        for path, tensors in in_the_files_layout(target, names).items()
    }


BY_NAME = {OURS: by_import_safetensors, ORBAX: by_orbax, BEST: by_orbax_at_its_best}


# ------------------------------------------------------------------------------------------------------ one measurement


def of_proc(file: str, field: str) -> int:
    """Reads a number from /proc/self, in bytes."""
    line = next(line for line in Path("/proc/self", file).read_text().splitlines() if line.startswith(f"{field}:"))
    value, *unit = line.split()[1:]
    return int(value) * (1024 if unit == ["kB"] else 1)


@contextlib.contextmanager
def peak_without_files() -> Iterator[list[int]]:
    """Yields a list with the peak of resident memory without pages of mapped files, sampled by a thread."""
    peak, done = [of_proc("status", "RssAnon")], threading.Event()

    def look() -> None:
        while not done.wait(SAMPLE_S):
            peak[0] = max(peak[0], of_proc("status", "RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Computes a checksum of each local shard, by leaf and index."""
    return {
        f"{path} {shard.index}": zlib.crc32(np.asarray(shard.data).reshape(-1).view(np.uint8).data)
        for path, array in arrays.items()
        for shard in array.addressable_shards
    }


def reference(folder: Path, target: Target, llama: Llama, case: Case) -> dict[str, int]:
    """Computes the checksum of every shard from the full model, as read by the safetensors library."""
    from safetensors.numpy import load_file

    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    found = {}
    for path, values in (by_hand(tensors, llama) if case.mapped else tensors).items():
        for index in target[path].sharding.devices_indices_map(values.shape).values():
            shard = np.ascontiguousarray(values[index].astype(case.dtype))
            found[f"{path} {index}"] = zlib.crc32(shard.reshape(-1).view(np.uint8).data)
    return found


def measured(reader: str, folder: Path, llama: Llama, case: Case) -> dict[str, Any]:
    """Reads the model in this process; returns times, memory, bytes read, and the checksums."""
    mesh = DeviceMeshManager.create_device_mesh({AXIS: DEVICES})
    target = target_of(llama, case, mesh)
    if reader == REFERENCE:
        return {"digests": reference(folder, target, llama, case)}
    import orbax.checkpoint.experimental.v1  # noqa: F401  before the clock starts

    names = names_of(llama) if case.mapped else None
    jax.block_until_ready(jax.device_put(np.zeros(DEVICES), NamedSharding(mesh, P(AXIS))))
    before, anon_before = of_proc("status", "VmRSS"), of_proc("status", "RssAnon")
    read_before, called_before = of_proc("io", "read_bytes"), of_proc("io", "rchar")
    begun = time.perf_counter(), time.process_time()
    with peak_without_files() as peak:
        arrays = jax.block_until_ready(BY_NAME[reader](folder, target, names))
    seconds, processor = time.perf_counter() - begun[0], time.process_time() - begun[1]
    held = sum(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards)
    return {
        "seconds": seconds,
        "processor seconds": processor,
        "bytes of the arrays": held,
        "peak above": max(of_proc("status", "VmHWM") - before - held, 0),
        "peak above, without files": max(peak[0] - anon_before - held, 0),
        "ru_maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bytes from the disk": of_proc("io", "read_bytes") - read_before,
        "bytes by calls": of_proc("io", "rchar") - called_before,
        "digests": digests(arrays),
    }


def child(task: Mapping[str, Any]) -> dict[str, Any]:
    case = Case(**task["case"])
    simulate_cpu_devices(DEVICES // case.processes)
    if case.processes > 1:
        initialize_distributed(task["address"], case.processes, task["rank"])
    return measured(task["reader"], Path(task["folder"]), Llama(**task["llama"]), case)


def in_processes(reader: str, folders: Sequence[Path], llama: Llama, case: Case) -> list[dict[str, Any]]:
    """Runs ``measured`` in new processes, one per folder; returns the results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    task = {"reader": reader, "llama": asdict(llama), "case": asdict(case), "address": address}
    for folder in folders:
        for file in folder.glob("*.safetensors"):
            with file.open("rb") as opened:
                if case.cached:
                    while opened.read(2**24):
                        pass
                else:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    children = []
    for rank, folder in enumerate(folders):
        text = json.dumps(task | {"rank": rank, "folder": str(folder)})
        command = [sys.executable, "-m", "benchmarks.safetensors_readers", "--child", text]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        answers = [process.communicate(timeout=TIMEOUT_S)[0] for process in children]
    finally:
        for process in children:
            process.kill()
    if any(process.returncode for process in children):
        raise RuntimeError(f"{reader} failed; its error stands above.")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def compared(case: Case, llama: Llama, folders: Sequence[Path], repeats: int) -> dict[str, dict[str, Any]]:
    """Measures the readers in turn; returns the summary of each reader, with the comparison to the reference."""
    [want] = in_processes(REFERENCE, folders[:1], llama, replace(case, processes=1))
    runs: dict[str, list[list[dict[str, Any]]]] = {reader: [] for reader in READERS}
    for _ in range(repeats):
        for reader in READERS:
            runs[reader].append(in_processes(reader, folders[: case.processes], llama, case))
    return {reader: summed_up(runs[reader], want["digests"]) for reader in READERS}


def summed_up(runs: Sequence[Sequence[Mapping[str, Any]]], want: Mapping[str, int]) -> dict[str, Any]:
    """Summarises runs: medians of the largest value over processes, and whether checksums equal ``want``."""
    equal = all({shard: crc for answer in run for shard, crc in answer["digests"].items()} == want for run in runs)
    numbers = [name for name in runs[0][0] if name != "digests"]
    most = {name: [max(answer[name] for answer in run) for run in runs] for name in numbers}
    medians = {name: statistics.median(values) for name, values in most.items()}
    return {"equal bits": equal, **medians, "all seconds": most["seconds"]}


# ----------------------------------------------------------------------------------------------------------- odd files


def odd_files() -> dict[str, tuple[Callable[[Path], object], Any]]:
    """Returns (change to a folder with a sound model in two files, target), by the description of the fault."""
    good = {"a": np.zeros((8, 4), np.float32), "b": np.zeros(8, np.float32)}

    def edited(change: Callable[[dict[str, Any]], object], values: bytes | None = None) -> Callable[[Path], None]:
        def edit(folder: Path) -> None:
            file = folder / "model-00001-of-00002.safetensors"
            content = file.read_bytes()
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            change(header)
            text = json.dumps(header).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + (values or content[8 + length :]))

        return edit

    def cut(folder: Path) -> None:
        file = folder / "model-00001-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-4])

    def longer(folder: Path) -> None:
        with (folder / "model-00001-of-00002.safetensors").open("ab") as file:
            file.write(b"rest")

    def left_over(folder: Path) -> None:
        """Adds a file that the index does not name, as left by an older model or a different format."""
        shutil.copyfile(folder / "model-00001-of-00002.safetensors", folder / "consolidated.safetensors")

    def missing(folder: Path) -> None:
        (folder / "model-00001-of-00002.safetensors").unlink()

    def index_of_another(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        where = json.loads(index.read_text())
        where["weight_map"]["a"] = where["weight_map"]["b"]
        index.write_text(json.dumps(where))

    def as_dtype(code: str, itemsize: int = 1) -> Callable[[Path], None]:
        entry = {"dtype": code, "shape": [32], "data_offsets": [0, 32 * itemsize]}
        return edited(lambda header: header["a"].update(entry), bytes(range(32)) * itemsize)

    def shape_of(*shape: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
        return good | {"a": np.zeros(shape, dtype)}

    def overlap(header: dict[str, Any]) -> None:
        header["c"] = header["a"]

    return {
        "as written": (lambda folder: None, good),
        "four bytes cut off": (cut, good),
        "four bytes more": (longer, good),
        "offsets that do not fit the shape": (edited(lambda header: header["a"].update(data_offsets=[0, 64])), good),
        "two tensors on the same bytes": (edited(overlap), good | {"c": good["a"]}),
        "a file beside it that the index does not name": (left_over, good),
        "an index that names the other file": (index_of_another, good),
        "a file of the index is missing": (missing, good),
        "a tensor that no leaf takes": (lambda folder: None, {"b": good["b"]}),
        "a leaf without a tensor": (lambda folder: None, good | {"d": good["b"]}),
        "another shape": (lambda folder: None, shape_of(16, 2)),
        "float32 into bfloat16, which loses bits": (lambda folder: None, shape_of(8, 4, dtype=jnp.bfloat16)),
        "float32 into int32, which loses more": (lambda folder: None, shape_of(8, 4, dtype=np.int32)),
        "a byte of BOOL that is neither 0 nor 1": (as_dtype("BOOL"), shape_of(32, dtype=bool)),
        **{
            code: (as_dtype(code), shape_of(32, dtype=jnp.dtype(dtype)))
            for code, dtype in (
                ("F8_E4M3", "float8_e4m3fn"),
                ("F8_E5M2", "float8_e5m2"),
                ("F8_E8M0", "float8_e8m0fnu"),
                ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
            )
        },
        "C64": (as_dtype("C64", 8), shape_of(32, dtype=np.complex64)),
    }


def verdicts(mesh: jax.sharding.Mesh) -> dict[str, dict[str, str]]:
    """Returns the result of both readers for each odd file: "read", or the first line of the error."""
    from safetensors.numpy import save_file

    found: dict[str, dict[str, str]] = {}
    for what, (change, target) in odd_files().items():
        with tempfile.TemporaryDirectory() as name:
            folder, where = Path(name), {}
            for i, (tensor, values) in enumerate((("a", (8, 4)), ("b", (8,))), start=1):
                where[tensor] = f"model-{i:05}-of-00002.safetensors"
                save_file(
                    {tensor: np.arange(math.prod(values), dtype=np.float32).reshape(values)}, folder / where[tensor]
                )
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
            change(folder)
            sharding = NamedSharding(mesh, P(AXIS))
            abstract = {
                path: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding) for path, like in target.items()
            }
            found[what] = {}
            for reader, read in ((OURS, import_safetensors), (ORBAX, orbax_load)):
                try:
                    jax.block_until_ready(read(folder, abstract))
                except Exception as error:  # any error of a reader is a result
                    first = str(error).replace(str(folder), "FOLDER").splitlines()[0]
                    found[what][reader] = f"{type(error).__name__}: {first}"
                else:
                    found[what][reader] = "read"
    return found


# ---------------------------------------------------------------------------------------------------------- the tables


# By heading: what was measured, its unit, and how it is shown.
COLUMNS = {
    "s": ("seconds", 1, ".1f"),
    "processor s": ("processor seconds", 1, ".1f"),
    "MB above": ("peak above", 1e6, ".0f"),
    "without files": ("peak above, without files", 1e6, ".0f"),
    "maxrss, MB": ("ru_maxrss", 1e6, ".0f"),
    "read, MB": ("bytes from the disk", 1e6, ".0f"),
}


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Returns the table rows of a case, one per reader; the first number is the time relative to this library."""
    rows = []
    for reader in READERS:
        row = found[reader]
        ratio = row["seconds"] / found[OURS]["seconds"]
        cells = [format(row[name] / unit, form) for name, unit, form in COLUMNS.values()]
        rows.append([reader, f"{ratio:.2f}", *cells, "yes" if row["equal bits"] else "NO"])
    return rows


def verdict(answer: str) -> str:
    """Shortens the result for an odd file to "read" or "refused (error type)"."""
    return answer if answer == "read" else f"refused ({answer.partition(':')[0]})"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--files", type=int, default=4, help="that the model is written to")
    parser.add_argument("--checkpoint", type=Path, help="a folder that transformers has saved a Llama to, in bfloat16")
    parser.add_argument("--small", action="store_true", help="a model of some kB")
    parser.add_argument("--out", type=Path, default=FILE, help="the JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return 0

    model = llama_of(options.checkpoint) if options.checkpoint else SMALL if options.small else Llama()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        for tied in [model.tied] if options.checkpoint else (False, True):
            cases = {text: CASES[text] for text in options.cases if CASES[text].tied == tied}
            llama = replace(model, tied=tied)
            folders = [Path(name, f"{i}") for i in range(max((case.processes for case in cases.values()), default=0))]
            for folder in folders:
                if folder == folders[0] and not options.checkpoint:
                    write_model(folder, llama, options.files)
                else:
                    shutil.copytree(options.checkpoint or folders[0], folder)
            os.sync()  # only what is on the disk can leave the cache
            for text, case in cases.items():
                results[text] = compared(case, llama, folders, options.repeats)
                columns = ["", "ratio", *COLUMNS, "equal"]
                table = rich_table(text, columns, rows_of(results[text]))
                Console(width=110).print(table)
            for folder in folders:
                shutil.rmtree(folder)
    simulate_cpu_devices(DEVICES)
    odd = verdicts(DeviceMeshManager.create_device_mesh({AXIS: DEVICES}))
    rows = [[what, *(verdict(answers[reader]) for reader in (OURS, ORBAX))] for what, answers in odd.items()]
    Console(width=110).print(rich_table("odd files", ["", OURS, ORBAX], rows))
    kept = {
        "model": asdict(model),
        "files": options.files,
        "repeats": options.repeats,
        "cases": results,
        "odd files": odd,
        "versions": installed_versions("safetensors") | installed_versions("orbax-checkpoint"),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(kept) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
