"""What was compiled is read again only where it is what the compiler would say: of the same request, and undamaged.

The entries themselves are tested without a compiler; a request's key on steps that are not compiled; and one step is.
"""

import dataclasses
import json
import os
import re
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.support import in_case
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.distributed.plan import ShardingPlan
from xlstm_jax.forecast import CompileError, Forecast, ReportCache, forecast
from xlstm_jax.forecast.compiling import compile_process, report_cache
from xlstm_jax.forecast.compiling.compile import StepCall, begin_for_topology
from xlstm_jax.forecast.compiling.report_cache import chosen_cache, user_cache
from xlstm_jax.forecast.hardware.topologies import parse_topology

KEY, OTHER = "0" * 64, "1" * 64
TEXTS = {"hlo": "HloModule step\n" * 100, "buffers": "é"}


@pytest.fixture
def cache(tmp_path):
    return ReportCache(tmp_path / "kept")


def entry(cache, key=KEY):
    return cache.folder / f"{key}.report"


# ---------------------------------------------------------------------------------------------------------- the entries


def test_report_cache_reads_only_the_entry_of_the_given_key(cache):
    assert cache.read(KEY) is None
    cache.write(KEY, TEXTS)
    assert cache.read(KEY) == TEXTS and cache.read(OTHER) is None
    assert (cache.hits, cache.misses, cache.problem) == (1, 2, "")
    assert cache.folder.stat().st_mode & 0o777 == 0o700 and os.listdir(cache.folder) == [entry(cache).name]


def test_report_cache_warns_of_a_damaged_entry_and_replaces_the_entry_on_write(cache):
    cache.write(KEY, TEXTS)
    sound = entry(cache).read_bytes()
    places = [*range(0, len(sound), 9), len(sound) - 1]
    flipped = [sound[:i] + bytes([sound[i] ^ 1]) + sound[i + 1 :] for i in places]
    cut = [sound[:i] for i in places]
    with pytest.warns(UserWarning, match=r"was not read from .*kept: an entry does not have its digest") as warned:
        for damaged in (*flipped, *cut, sound + b"\0", b"\0" * len(sound)):
            entry(cache).write_bytes(damaged)
            assert cache.read(KEY) is None
    assert len(warned) == 1
    cache.write(KEY, TEXTS)
    assert cache.read(KEY) == TEXTS and len(flipped) > 9  # guard


def test_report_cache_warns_of_an_entry_renamed_to_another_key(cache):
    cache.write(KEY, TEXTS)
    entry(cache).rename(entry(cache, OTHER))
    with pytest.warns(UserWarning, match="digest"):
        assert cache.read(OTHER) is None and cache.read(KEY) is None


def planted(content):
    """An entry whose digest is right."""
    return lambda path: path.write_bytes(report_cache._digest(KEY, content) + content)


def linked(path):
    path.rename(path.with_name("sound"))
    path.symlink_to("sound")


def a_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


UNUSABLE = {
    "another's": (lambda path: os.chown(path, 65534, 65534), "another user .number 65534."),
    "written by others": (lambda path: path.chmod(0o620), "others may write .*report"),
    "in a folder of others": (lambda path: os.chown(path.parent, 65534, 65534), "kept belongs to another user"),
    "in a folder that others may write": (lambda path: path.parent.chmod(0o777), "others may write .*kept .run chmod"),
    "a link": (linked, "is not a regular file"),
    "a pipe": (a_pipe, "is not a regular file"),
    "too large": (lambda path: os.truncate(path, 2**28 + 1), "has 268435457 bytes, more than the 268435456"),
    "of zeros": (planted(zlib.compress(b'{"hlo":"' + bytes(2**20) + b'"}')), "inflates to more than 1000000 bytes"),
    "cut off": (planted(zlib.compress(b"{}")[:-1]), "is cut off"),
    "not zlib": (planted(b"xx"), "holds no texts .Error -3"),
    "not JSON": (planted(zlib.compress(b"{")), "holds no texts .Expecting"),
    "deep": (planted(zlib.compress(b"[" * 100_000)), "holds no texts .maximum recursion|holds no texts"),
    "a list": (planted(zlib.compress(b"[1]")), "holds no texts"),
    "of numbers": (planted(zlib.compress(b'{"hlo": 1}')), "holds no texts"),
}


@pytest.mark.parametrize("hurt, reason", UNUSABLE.values(), ids=UNUSABLE)
def test_report_cache_warns_of_unsafe_or_malformed_entries_and_returns_none(hurt, reason, cache, monkeypatch):
    cache.write(KEY, TEXTS)
    try:
        hurt(entry(cache))
    except PermissionError:
        pytest.skip("only root gives files away")
    if "1000000" in reason:
        monkeypatch.setattr(report_cache, "MAX_ENTRY_BYTES", 1_000_000)
    with pytest.warns(UserWarning, match=f"a compiled report was not read from .*{reason}.*compiled anew") as warned:
        assert cache.read(KEY) is None and cache.read(KEY) is None
    assert len(warned) == 1 and cache.misses == 2
    cache.write(KEY, TEXTS)
    folder_is_bad = "kept" in reason
    assert bool(cache.problem) == folder_is_bad and (cache.read(KEY) == TEXTS) != folder_is_bad


def test_report_cache_does_not_keep_a_report_above_max_entry_bytes(cache, monkeypatch):
    monkeypatch.setattr(report_cache, "MAX_ENTRY_BYTES", 100)
    cache.write(KEY, TEXTS)
    assert re.search(r"the report has \d+ bytes, more than the 100 that an entry may", cache.problem)
    assert os.listdir(cache.folder) == []


@pytest.mark.parametrize(
    "what, read, number", [("a plan", ShardingPlan.from_json, 3), ("a forecast", Forecast.from_json, 2)]
)
@pytest.mark.parametrize(
    "text, why",
    [
        ("[" * 100_000, r"because it is not JSON"),
        ('{"format": ' + "9" * 5000 + "}", r"because it is not JSON: Exceeds the limit"),
        ("", r"because it is not JSON: Expecting value"),
        ('{"format": NUMBER}', r"as the library writes it: .* '\w+'"),
        ('{"format": NUMBER, "leaves": [], "unknown_loops": 3}', r"as the library writes it: .*"),
    ],
    ids=["deep", "long number", "empty", "no fields", "other types"],
)
def test_from_json_raises_for_malformed_plan_or_forecast_text(what, read, number, text, why):
    with pytest.raises(ValueError, match=f"^this is not {what}.* {why}|^this is not {what}, {why}"):
        read(text.replace("NUMBER", str(number)))


def test_report_cache_reports_unreadable_or_unwritable_entries_without_raising(cache, tmp_path, monkeypatch):
    entry(cache).mkdir(parents=True)
    cache.folder.chmod(0o700)
    with pytest.warns(UserWarning, match="is not a regular file"):
        assert cache.read(KEY) is None
    cache.write(KEY, TEXTS)
    assert "Is a directory" in cache.problem
    beneath = ReportCache(tmp_path / "file" / "kept")
    (tmp_path / "file").write_text("")
    beneath.write(KEY, TEXTS)
    assert beneath.problem == f"{tmp_path}/file/kept: Not a directory" and beneath.read(KEY) is None


def test_report_cache_interrupted_write_leaves_the_old_entry_or_none(cache, monkeypatch):
    cache.write(KEY, TEXTS)

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report_cache.os, "replace", die)
    for key in (KEY, OTHER):
        with in_case(key=key), pytest.raises(KeyboardInterrupt, match=r"^$"):
            cache.write(key, {"hlo": "half"})
    assert cache.read(KEY) == TEXTS and cache.read(OTHER) is None
    assert os.listdir(cache.folder) == [entry(cache).name]


def test_report_cache_beyond_max_bytes_evicts_least_recently_read_entries(cache):
    for number in range(4):
        cache.write(str(number) * 64, TEXTS)
        os.utime(entry(cache, str(number) * 64), (number, number))
    assert cache.read("0" * 64) == TEXTS  # so it is the newest now
    cache.max_bytes = 3 * entry(cache).stat().st_size
    cache.write("4" * 64, TEXTS)
    assert sorted(path.name[0] for path in cache.folder.iterdir()) == ["0", "3", "4"]


@pytest.mark.parametrize(
    "variables, folder",
    [
        ({"XLSTM_JAX_CACHE_DIR": "/scratch/kept", "XDG_CACHE_HOME": "/elsewhere"}, "/scratch/kept"),
        ({"XLSTM_JAX_CACHE_DIR": ""}, None),
        ({"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/xlstm_jax"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "/home/me/.cache/xlstm_jax"),
        ({}, "/home/me/.cache/xlstm_jax"),
    ],
    ids=str,
)
def test_user_cache_folder_follows_environment_variables(variables, folder, monkeypatch):
    assert user_cache() is None  # the suite has none
    for name in ("XLSTM_JAX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(name, value)
    found = user_cache()
    assert (found and str(found.folder)) == folder
    own = ReportCache(Path("own"))
    assert chosen_cache(True) == found and chosen_cache(False) is None and chosen_cache(own) is own


# -------------------------------------------------------------------------------------------------------------- the key


def request(scale=2.0, name="up", options=None, topology="v5e:1x1", donate=(), shape=(256, 256), axes=None):
    def step(x):
        with jax.named_scope(name):
            return jnp.tanh(x @ x) * scale

    sharding = None
    if axes:
        mesh = DeviceMeshManager.create_abstract_mesh(axes)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(tuple(axes)))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    jitted = jax.jit(step, donate_argnums=donate)
    return begin_for_topology(StepCall(jitted, (x,), {}, parse_topology(topology), options))


@pytest.mark.libtpu
def test_cache_key_is_independent_of_the_calling_source_lines():

    def from_elsewhere():
        return request()  # other lines are on the way to the step

    assert len({request().key, from_elsewhere().key}) == 1
    assert b"test_report_cache" not in request().step


@pytest.mark.libtpu
@pytest.mark.parametrize(
    "changed",
    [
        {"scale": 3.0},
        {"name": "down"},  # a name alone: the report is told by modules
        {"shape": (256, 128, 128)},
        {"donate": (0,)},
        {"options": {"xla_tpu_enable_ici_ag_pipelining": True}},
        {"topology": "v6e:1x1"},
        {"topology": "v5e:2x2", "axes": {"fsdp": 4}},
        {"topology": "v5e:2x2", "axes": {"fsdp_x": 2, "fsdp_y": 2}},
    ],
    ids=str,
)
def test_cache_key_changes_with_program_topology_and_compiler_options(changed):
    base = {"topology": "v5e:2x2", "axes": {"dp": 4}} if "axes" in changed else {}
    assert request(**base | changed).key != request(**base).key


def bumped(name):
    version = compile_process.version
    return lambda package: version(package) + (".1" if package == name else "")


@pytest.mark.libtpu
@pytest.mark.parametrize("package", ["jax", "jaxlib", "libtpu"])
def test_cache_key_changes_with_jax_jaxlib_and_libtpu_version(package, monkeypatch):
    before = request().key
    monkeypatch.setattr(compile_process, "version", bumped(package))
    assert request().key != before


@pytest.mark.libtpu
def test_cache_key_changes_with_compiler_environment_library_and_child_program(monkeypatch, tmp_path):
    before = request().key
    monkeypatch.setenv("LESS", "-R")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")  # of another backend: the child does not get it
    assert request().key == before
    with monkeypatch.context() as within:
        within.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_latency_hiding_scheduler=false")
        assert request().key != before
    library = tmp_path / "libtpu.so"
    library.write_bytes(b"one")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    one = request().key
    library.write_bytes(b"another")
    assert len({before, one, request().key}) == 3
    # And the program that serves the request.
    (tmp_path / "child.py").write_text(Path(compile_process.compile_child.__file__).read_text() + "# changed")
    monkeypatch.setattr(compile_process.compile_child, "__file__", str(tmp_path / "child.py"))
    assert request().key not in {before, one}


# ------------------------------------------------------------------------------------------------------------- one step


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A step without any sharding, for one chip: compiled, and kept."""
    pytest.importorskip("libtpu")
    cache = ReportCache(tmp_path_factory.mktemp("cache"))
    step, x = jax.jit(lambda x: jnp.tanh(x @ x)), jax.ShapeDtypeStruct((512, 512), jnp.float32)
    return step, x, cache, forecast(step, x, topology="v5e:1x1", cache=cache)


@pytest.mark.libtpu
def test_forecast_compiles_a_step_without_shardings_for_a_single_chip(compiled):
    *_, found = compiled
    assert found.device_kind == "TPU v5 lite" and found.memory.argument_bytes == 512 * 512 * 4
    assert found.flops.total == 2 * 512**3 and not found.collectives


@pytest.mark.libtpu
def test_forecast_from_the_cache_equals_the_forecast_of_the_compiler(compiled, monkeypatch):
    step, x, cache, found = compiled
    with monkeypatch.context() as within:
        within.setattr(compile_process.sys, "executable", "/bin/false")
        assert forecast(step, x, topology="v5e:1x1", cache=cache) == found
        # The tokens are no matter of the compiler, and the library of today reads what it said.
        assert forecast(step, x, topology="v5e:1x1", cache=cache, tokens=512).tokens == 512
        with pytest.raises(CompileError, match="process ended with exit code 1"):
            forecast(step, x, topology="v5e:1x1", cache=False)
    (path,) = cache.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    misses = cache.misses
    with pytest.warns(UserWarning, match="digest"):
        again = forecast(step, x, topology="v5e:1x1", cache=cache)
    assert dataclasses.replace(again, compile_seconds=found.compile_seconds) == found and cache.misses == misses + 1
    assert forecast(step, x, topology="v5e:1x1", cache=cache) == again


@pytest.mark.libtpu
def test_report_cache_keeps_only_repeatable_compiler_results(monkeypatch):
    errors = {None: True, "XlaRuntimeError: RESOURCE_EXHAUSTED: of HBM": True, "INTERNAL: disk": False}
    versions = compile_process._versions(packages := ["jax", "jaxlib", "libtpu"])
    told = {error: json.dumps({"error": error, "versions": versions}) for error in errors}
    for error, final in errors.items():
        assert compile_process._is_final({"result.json": told[error]}, packages) is final
    monkeypatch.setattr(compile_process, "version", bumped("libtpu"))  # installed since the child has started
    assert not compile_process._is_final({"result.json": told[None]}, packages)
