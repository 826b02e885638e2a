"""The metric logger: exact values in its files, one interval late, without waiting, through kills and restarts."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.support import mesh_of
from xlstm_jax.distributed.metrics.metric_logger import MetricLogger

ROOT = Path(__file__).parents[2]


def open_logger(folder, **options):
    return MetricLogger(folder, **({"tensorboard": False} | options))


def csv_rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def json_rows(folder):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder):
    """The steps on disk, which must be the same in both files."""
    by_csv = [int(row["step"]) for row in csv_rows(folder)]
    assert by_csv == [row["step"] for row in json_rows(folder)]
    return by_csv


def log_range(folder, first, last, **options):
    with open_logger(folder, **options) as logger:
        for step in range(first, last + 1):
            logger.log(step, {"loss": jnp.float32(step) / 8})


# What is written.


def test_values_read_back_by_their_joined_names(tmp_path):
    metrics = {
        "train": {"loss": jnp.float32(0.25), "tokens": jnp.int32(7)},
        "accuracy": jnp.array([0.5, 1.0]),
        "seconds": 0.125,
        "count": np.int64(2**53 + 1),
        "finite": True,
    }
    with open_logger(tmp_path / "new" / "folder") as logger:
        logger.log(3, metrics)
    want = {"step": 3, "train/loss": 0.25, "train/tokens": 7, "accuracy": [0.5, 1.0], "seconds": 0.125}
    want |= {"count": 2**53 + 1, "finite": 1}
    assert json_rows(tmp_path / "new" / "folder") == [want]
    assert (tmp_path / "new" / "folder" / "metrics.csv").read_text() == (
        "step,train/loss,train/tokens,accuracy/0,accuracy/1,seconds,count,finite\n3,0.25,7,0.5,1.0,0.125,9007199254740993,1\n"
    )


@pytest.mark.parametrize(
    "value, text",
    [
        (jnp.float32(0.1), "0.1"),
        (np.float32(1 / 3), "0.33333334"),
        (np.float32(1e-45), "1e-45"),
        (np.float32(16777216), "16777216.0"),
        (np.float64(0.1) + 0.2, "0.30000000000000004"),
        (0.1, "0.1"),
        (jnp.float16(0.1), "0.1"),
        (jnp.bfloat16(0.1), "0.100097656"),
        (jnp.float32(-0.0), "-0.0"),
        (jnp.uint32(2**32 - 1), "4294967295"),
        (jnp.bool_(False), "0"),
        (10**30, str(10**30)),
    ],
    ids=str,
)
def test_numbers_are_the_shortest_that_read_back(tmp_path, value, text):
    with open_logger(tmp_path) as logger:
        logger.log(1, {"x": value})
    assert csv_rows(tmp_path) == [{"step": "1", "x": text}]
    assert (tmp_path / "metrics.jsonl").read_text() == f'{{"step": 1, "x": {text}}}\n'


def test_any_float32_reads_back_bit_for_bit(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    want = bits[np.isfinite(bits)]
    assert len(want) > 1900
    with open_logger(tmp_path) as logger:
        logger.log(1, {"x": jnp.asarray(want)})
    got_json = np.array(json_rows(tmp_path)[0]["x"], np.float32)
    got_csv = np.array([np.float32(cell) for cell in list(csv_rows(tmp_path)[0].values())[1:]])
    for got in (got_json, got_csv):
        np.testing.assert_array_equal(got.view(np.uint32), np.asarray(want).view(np.uint32))


def test_what_is_not_finite_is_a_word_in_strict_json(tmp_path):
    with open_logger(tmp_path) as logger:
        logger.log(1, {"a": jnp.nan, "b": jnp.array([jnp.inf, -jnp.inf, 1.0]), "c": jnp.float32(jnp.nan)})
    assert json_rows(tmp_path) == [{"step": 1, "a": "nan", "b": ["inf", "-inf", 1.0], "c": "nan"}]
    assert csv_rows(tmp_path) == [{"step": "1", "a": "nan", "b/0": "inf", "b/1": "-inf", "b/2": "1.0", "c": "nan"}]


def test_a_new_name_widens_the_table_and_loses_no_row(tmp_path):
    with open_logger(tmp_path) as logger:
        logger.log(1, {"loss": 3.0})
        logger.log(2, {"loss": 2.0, "b, quoted": 1, "accuracy": np.ones(2)})
        logger.log(3, {"loss": 1.5})
        logger.log(4, {"accuracy": np.zeros(3)})
    assert (tmp_path / "metrics.csv").read_text() == (
        'step,loss,"b, quoted",accuracy/0,accuracy/1,accuracy/2\n'
        "1,3.0,,,,\n"
        "2,2.0,1,1.0,1.0,\n"
        "3,1.5,,,,\n"
        "4,,,0.0,0.0,0.0\n"
    )
    assert [sorted(row) for row in json_rows(tmp_path)][2:] == [["loss", "step"], ["accuracy", "step"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_arrays_on_a_mesh_are_read_whole(tmp_path):
    mesh = mesh_of(2, 4)
    split = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, PartitionSpec("fsdp")))
    whole = jax.device_put(jnp.float32(2), jax.NamedSharding(mesh, PartitionSpec()))
    with open_logger(tmp_path) as logger:
        logger.log(1, {"split": split, "whole": whole})
    assert json_rows(tmp_path) == [{"step": 1, "split": list(range(8)), "whole": 2}]


def test_a_numpy_array_may_be_overwritten_once_logged(tmp_path):
    counts = np.zeros(2)
    with open_logger(tmp_path) as logger:
        logger.log(1, {"counts": counts})
        counts += 1
    assert json_rows(tmp_path) == [{"step": 1, "counts": [0.0, 0.0]}]


# When it is written.


def test_a_row_is_written_one_call_later(tmp_path):
    logger = open_logger(tmp_path)
    logger.log(1, {"loss": jnp.float32(3)})
    assert steps(tmp_path) == []
    logger.log(2, {"loss": jnp.float32(2)})
    assert steps(tmp_path) == [1]
    logger.flush()
    assert steps(tmp_path) == [1, 2]
    logger.log(3, {"loss": jnp.float32(1)})
    assert steps(tmp_path) == [1, 2]
    logger.close()
    logger.close()
    logger.flush()
    assert steps(tmp_path) == [1, 2, 3]


def test_log_returns_while_the_device_still_computes(tmp_path):
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 150, lambda _, y: jnp.tanh(y @ x), x).sum()

    x = jnp.ones((512, 512))
    slow(x).block_until_ready()
    with open_logger(tmp_path) as logger:
        logger.log(1, {"loss": jnp.float32(1)})
        logger.log(2, {"loss": jnp.float32(1)})
        loss = slow(x)
        start = time.perf_counter()
        logger.log(3, {"loss": loss})
        logged = time.perf_counter()
        assert not loss.is_ready()
        assert steps(tmp_path) == [1, 2]
        loss.block_until_ready()
        assert logged - start < time.perf_counter() - logged
    assert steps(tmp_path) == [1, 2, 3]


def test_an_exception_in_the_block_still_writes_the_pending_row(tmp_path):
    with pytest.raises(KeyError, match="mine"), open_logger(tmp_path) as logger:
        logger.log(1, {"loss": jnp.float32(1)})
        raise KeyError("mine")
    assert steps(tmp_path) == [1]


def test_an_exception_in_the_block_is_not_replaced_by_one_about_the_row(tmp_path):
    with pytest.raises(KeyError, match="mine") as caught, open_logger(tmp_path) as logger:
        loss = jnp.ones(1)
        logger.log(1, {"loss": loss})
        loss.delete()
        raise KeyError("mine")
    assert "metrics['loss'] of step 1 was deleted" in caught.value.__notes__[0]


def test_a_killed_process_loses_at_most_the_pending_row(tmp_path):
    code = """if True:
        import itertools, sys
        import jax.numpy as jnp
        from xlstm_jax.distributed.metrics.metric_logger import MetricLogger
        logger = MetricLogger(sys.argv[1], tensorboard=False)
        for step in itertools.count(1):
            logger.log(step, {"loss": jnp.float32(step) / 8})
            print(step, flush=True)
    """
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) == 300:
                break
        process.send_signal(signal.SIGKILL)
        logged = [300, *map(int, process.stdout.read().split())][-1]
    assert process.returncode == -signal.SIGKILL
    # The kill may fall anywhere, also between the two files and within a line; what log had written is there.
    for name in ("metrics.csv", "metrics.jsonl"):
        text = (tmp_path / name).read_bytes()
        assert text.count(b"\n") - name.endswith("csv") >= logged - 1
    log_range(tmp_path, 10**6, 10**6, resume_step=10**6 - 1)
    *rows, last = json_rows(tmp_path)
    assert len(rows) >= 299
    assert rows == [{"step": step, "loss": step / 8} for step in range(1, len(rows) + 1)]
    assert steps(tmp_path) == [*range(1, len(rows) + 1), last["step"]]


# Going on.


def test_going_on_drops_the_rows_that_are_trained_again(tmp_path):
    log_range(tmp_path, 1, 6)
    log_range(tmp_path, 5, 8, resume_step=4)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [float(row["loss"]) for row in csv_rows(tmp_path)] == [step / 8 for step in range(1, 9)]


def test_going_on_from_nothing_and_to_nothing(tmp_path):
    log_range(tmp_path, 0, 2, resume_step=-1)
    assert steps(tmp_path) == [0, 1, 2]
    log_range(tmp_path, 0, 1, resume_step=-1)
    assert steps(tmp_path) == [0, 1]


@pytest.mark.parametrize("cut", [1, 9])
@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_a_torn_last_line_is_dropped(tmp_path, name, cut):
    with open_logger(tmp_path) as logger:
        for step in (1, 2, 3):
            logger.log(step, {"löss": step / 8, "per_class": np.arange(2)})
    # The table is written last: where a line of JSON is torn, the table does not have its row.
    if name == "metrics.jsonl":
        torn = (tmp_path / "metrics.csv").read_text().splitlines(keepends=True)[:-1]
        (tmp_path / "metrics.csv").write_text("".join(torn))
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-cut])
    with open_logger(tmp_path, resume_step=3) as logger:
        logger.log(4, {"löss": 0.5, "per_class": np.arange(2)})
    # What the line of JSON still tells, the table is given back.
    assert steps(tmp_path) == ([1, 2, 4] if name == "metrics.jsonl" else [1, 2, 3, 4])
    assert csv_rows(tmp_path)[-2:] == [
        {"step": str(step), "löss": str(step / 8), "per_class/0": "0", "per_class/1": "1"}
        for step in steps(tmp_path)[-2:]
    ]


def test_a_file_that_was_never_finished_is_begun_again(tmp_path):
    (tmp_path / "metrics.csv").write_text("st")
    (tmp_path / "metrics.jsonl").write_text("")
    log_range(tmp_path, 1, 2, resume_step=0)
    assert steps(tmp_path) == [1, 2]


def test_columns_keep_their_order_when_a_run_goes_on(tmp_path):
    with open_logger(tmp_path) as logger:
        logger.log(1, {"b": 1.0})
        logger.log(2, {"a": float("nan")})
    with open_logger(tmp_path, resume_step=2) as logger:
        logger.log(3, {"c": 3.0, "a": 2.0})
    assert (tmp_path / "metrics.csv").read_text() == "step,b,a,c\n1,1.0,,\n2,,nan,\n3,,2.0,3.0\n"


def test_the_table_is_made_anew_from_the_record_with_the_columns_of_the_rows_that_stay(tmp_path):
    with open_logger(tmp_path) as logger:
        logger.log(1, {"b": 1.0, "per_class": np.array([np.inf, 2])})
        logger.log(2, {"gone": 1.0})
    (tmp_path / "metrics.csv").write_text("changed by hand\n")
    log_range(tmp_path, 2, 2, resume_step=1)
    assert (tmp_path / "metrics.csv").read_text() == "step,b,per_class/0,per_class/1,loss\n1,1.0,inf,2.0,\n2,,,,0.25\n"


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_files_of_a_run_are_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(
        FileExistsError, match=rf"{name} holds the metrics of a run\. Choose another folder, or pass re"
    ):
        open_logger(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("metrics.csv", "epoch,loss\n1,2.0\n", r"metrics\.csv is there without metrics\.jsonl"),
        ("metrics.jsonl", '{"step": 2}\n{"step": 1}\n', r"line '{\"step\": 1}', which .* \(step 1 after step 2\)"),
        ("metrics.jsonl", '{"step": "x"}\n', r"which no MetricLogger wrote there \('str' object"),
        ("metrics.jsonl", '{"step": 1}\n{"ste\n{"step": 3}\n', r"line '{\"ste', which no MetricLogger"),
        ("metrics.jsonl", "5\n", r"line '5', which no MetricLogger wrote there"),
        ("metrics.jsonl", "[1]\n", r"line '\[1\]', which no MetricLogger wrote there"),
        ("metrics.jsonl", '{"loss": 1}\n', r"which no MetricLogger wrote there \('step'\)"),
        (
            "metrics.jsonl",
            '{"step": 1, "\\ud83d": 1}\n',
            r"which no MetricLogger wrote .*surrogates not allowed",
        ),
        (
            "metrics.jsonl",
            b'{"step": 1, "lo\xffs": 1}\n{"step": 2}\n',
            r"which no MetricLogger wrote .*invalid start",
        ),
    ],
    ids=str,
)
def test_lines_that_no_logger_wrote_are_refused_and_left(tmp_path, name, text, message):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_logger(tmp_path, resume_step=5)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == content


def test_a_table_that_cannot_be_made_anew_stays_open(tmp_path, monkeypatch):
    """As on a full disk: the row of the new name is in the record, and in the table as soon as that can be written."""
    with open_logger(tmp_path) as logger:
        logger.log(1, {"a": 1.0})
        logger.log(2, {"b": 1.0})
        with monkeypatch.context() as full, pytest.raises(OSError, match="no room"):
            full.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
            logger.log(3, {"a": 2.0})
        logger.flush()
        assert (tmp_path / "metrics.csv").read_text() == "step,a\n1,1.0\n3,2.0\n"
        logger.log(4, {"b": 2.0})
    assert (tmp_path / "metrics.csv").read_text() == "step,a,b\n1,1.0,\n2,,1.0\n3,2.0,\n4,,2.0\n"


def test_nothing_is_written_through_a_link_that_somebody_put_there(tmp_path):
    (precious := tmp_path / "precious").write_text("keep me")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.csv.tmp", "metrics.jsonl.tmp"):
        (folder / name).symlink_to(precious)
    log_range(folder, 1, 2)
    assert precious.read_text() == "keep me" and steps(folder) == [1, 2]
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.csv", "metrics.jsonl"]


# What is refused.


@pytest.mark.parametrize("folder", ["gs://bucket/run", "file:///run", Path("s3://bucket")], ids=str)
def test_a_url_is_no_folder(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"folder='(gs://bucket/run|file:///run|s3:/bucket)' is a URL: .* copy it"):
        open_logger(folder)
    open_logger("a:b").close()  # guard: a folder may have a colon in its name
    assert [path.name for path in tmp_path.iterdir()] == ["a:b"]


@pytest.mark.parametrize(
    "metrics, message",
    [
        ({"a": {"b": jnp.ones((2, 3))}}, r"metrics\['a/b'\] is a float32\[2, 3\]: a value is a real number or a 1-D"),
        ({"a": "high"}, r"metrics\['a'\] is a str: a value is a real number"),
        ({"a": [1.0, 2.0]}, r"metrics\['a'\] is a list"),
        ({"a": 1j}, r"metrics\['a'\] is a complex"),
        ({"a": np.array(["x"])}, r"metrics\['a'\] is a <U1\[1\]"),
        ({"a": jax.random.key(0)}, r"metrics\['a'\] is a key<fry>\[\]"),
        (3.0, r"metrics is a float; pass a dict"),
        ({"a": {3: 1.0}}, r"metrics has the key a/3 of type int: keys are strings"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:20],
)
def test_values_of_another_kind_are_refused(tmp_path, metrics, message):
    check_refused(tmp_path, TypeError, 2, metrics, message)


@pytest.mark.parametrize(
    "metrics, message",
    [
        ({"a/b": 1.0, "a": {"b": 2.0}}, r"gives 'a/b' a second meaning: .* Rename one"),
        ({"a": np.ones(2), "a/1": 2.0}, r"gives 'a/1' a second meaning"),
        ({"a": {"\ud83d": 1.0}}, r"metrics has the key 'a/\\ud83d', which is not Unicode .* Rename it"),
        ({"step": 1.0}, r"gives 'step' a second meaning: the step has the column 'step'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:20],
)
def test_names_that_are_taken_are_refused(tmp_path, metrics, message):
    check_refused(tmp_path, ValueError, 2, metrics, message)


@pytest.mark.parametrize(
    "step, kind, message",
    [
        (1, ValueError, r"step=1 after step 1: steps increase strictly"),
        (0, ValueError, r"step=0 after step 1"),
        (1.5, TypeError, r"step=1.5 is a float; a step is an integer"),
        (True, TypeError, r"step=True is a bool; a step is an integer"),
        (np.int64(1), ValueError, r"step=1 after step 1"),
    ],
    ids=str,
)
def test_steps_are_host_integers_that_increase(tmp_path, step, kind, message):
    check_refused(tmp_path, kind, step, {"loss": 1.0}, message)


def check_refused(folder, kind, step, metrics, message):
    """The call raises; the row before it stays pending, and logging goes on as if the call had not been."""
    with open_logger(folder) as logger:
        logger.log(1, {"loss": 1.0})
        with pytest.raises(kind, match=message):
            logger.log(step, metrics)
        assert steps(folder) == []
        logger.log(2, {"loss": 2.0})
    assert json_rows(folder) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


def test_a_step_on_the_device_is_refused(tmp_path):
    check_refused(tmp_path, TypeError, jnp.int32(2), {"loss": 1.0}, r"reading an array would wait for the device")


def test_any_text_is_a_name(tmp_path):
    names = ["a\nb", "a\rb", "", "=1+1", "a,b", "\u2028", "n" * 2000]
    for step in (1, 2):
        with open_logger(tmp_path, resume_step=step - 1) as logger:
            logger.log(step, dict.fromkeys(names, -1.0) | MappingProxyType({"3": MappingProxyType({"4": 1})}))
    assert [list(row) for row in json_rows(tmp_path)] == [["step", *names, "3/4"]] * 2
    assert [list(row) for row in csv_rows(tmp_path)] == [["step", *names, "3/4"]] * 2


def test_steps_up_to_resume_step_count_as_logged(tmp_path):
    counted = pytest.raises(ValueError, match=r"step=7 after step 7.*resume_step counts as logged")
    with open_logger(tmp_path, resume_step=7) as logger, counted:
        logger.log(7, {"loss": 1.0})
    with pytest.raises(TypeError, match=r"resume_step='7' is a str; a step"):
        open_logger(tmp_path / "other", resume_step="7")


def test_logging_inside_jit_or_after_the_end_is_refused(tmp_path):
    traced = pytest.raises(TypeError, match=r"metrics\['x'\] is traced: log is called inside jit")
    with open_logger(tmp_path) as logger, traced:
        jax.jit(lambda x: logger.log(1, {"x": x}))(1.0)
    with pytest.raises(ValueError, match=r"log\(1, \.\.\.\) on a closed MetricLogger"):
        logger.log(1, {"x": 1.0})


def test_a_deleted_array_is_named(tmp_path):
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    with open_logger(tmp_path) as logger:
        loss = jnp.ones(4)
        logger.log(1, {"eval": {"loss": loss}})
        donate(loss)
        assert loss.is_deleted()
        with pytest.raises(ValueError, match=r"metrics\['eval/loss'\] of step 1 was deleted before its row was writt"):
            logger.log(2, {"loss": 2.0})
        with pytest.raises(ValueError, match=r"metrics\['loss'\] is a deleted array: .* Log what the function returns"):
            logger.log(3, {"loss": loss})
    assert json_rows(tmp_path) == [{"step": 2, "loss": 2.0}]  # the row of the call that raised is held nevertheless


# TensorBoard.


def events(folder):
    """(tag, step, value) of all event files, oldest file first; and the steps from which on former values are void."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    values, purged = [], []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:  # a record is its length in 8 bytes, a checksum in 4, the bytes, a checksum in 4
            end = 12 + int.from_bytes(data[:8], "little")
            event, data = event_pb2.Event.FromString(data[12:end]), data[end + 4 :]
            purged += [event.step] if event.HasField("session_log") else []
            values += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return values, purged


def test_event_files_hold_the_same_values(tmp_path):
    pytest.importorskip("tensorboardX")
    with open_logger(tmp_path, tensorboard=None) as logger:
        logger.log(1, {"train": {"loss": jnp.float32(0.1)}, "accuracy": jnp.array([0.5, 1.0])})
        logger.log(2, {"count": 3})
    with open_logger(tmp_path, tensorboard=True, resume_step=1) as logger:
        logger.log(2, {"count": 4})
    values, purged = events(tmp_path)
    assert values == [
        ("train/loss", 1, float(np.float32(0.1))),
        ("accuracy/0", 1, 0.5),
        ("accuracy/1", 1, 1.0),
        ("count", 2, 3.0),
        ("count", 2, 4.0),
    ]
    assert purged == [2]


def test_no_event_files_where_they_are_not_wanted(tmp_path):
    log_range(tmp_path, 1, 2, tensorboard=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_demanding_event_files_without_a_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with MetricLogger(tmp_path / "without") as logger:
        logger.log(1, {"loss": 1.0})
    with pytest.raises(ImportError, match=r"tensorboard=True, but tensorboardX cannot be .*Run `pip install tensorbo"):
        MetricLogger(tmp_path / "demanded", tensorboard=True)
    assert [path.name for path in tmp_path.iterdir()] == ["without"]
    assert steps(tmp_path / "without") == [1]
