"""Errors of checkpoints, safetensors files, and jobs of several processes, in temporary folders."""

import json
import os
import tempfile
from pathlib import Path

import safetensors.numpy

from tests.errors.shared import AXES, BATCH, MESH, create_train_state, fsdp, jax, jnp, nn, np, optax
from tests.errors.table import Section
from xlstm_jax.distributed import (
    Checkpointer,
    abstract_train_state,
    export_safetensors,
    import_safetensors,
    initialize_distributed,
)
from xlstm_jax.distributed.checkpoint import (
    CheckpointError,
    Divided,
    Joined,
    Repeated,
    Stacked,
    Stored,
    Unstacked,
    VersionNeededError,
    apply_publication,
    from_layout,
    import_in_layout,
    publish,
)
from xlstm_jax.distributed.checkpoint.checksums import checksum_each
from xlstm_jax.distributed.checkpoint.record import check_sound, from_json, record_without_sums, to_json, with_sums

checkpoints, tensors, processes = map(Section, ["Checkpoints", "Safetensors", "Several processes"])
STATE = {"w": jnp.ones((3, 4)), "rng": jax.random.key(0), "n": 300}
TWO = {"a": {"params": {"w": jnp.ones(3)}, "opt": {"w": jnp.ones(3)}}, "b": {"params": {"w": jnp.ones(3)}}}


def within(work):
    """Returns a call of ``work(folder)`` with an empty folder."""

    def call():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            work(Path(folder))

    return call


def saved(use, state=None, step=1, **options):
    """Returns a call that saves a step and runs ``use(checkpointer)`` in the same folder."""

    def work(folder):
        with Checkpointer(folder, **options) as checkpointer:
            if state is not None:
                checkpointer.save(step, state)
            use(checkpointer)

    return within(work)


def into(**change):
    return saved(lambda checkpointer: checkpointer.restore(STATE | change), STATE)


def params(like, path=None):
    return saved(lambda checkpointer: checkpointer.restore_params(like, path=path), TWO, 20)


def saving(state):
    return saved(lambda checkpointer: checkpointer.save(1, state))


def option(**options):
    return within(lambda folder: Checkpointer(folder, **options))


def placed(make):
    """Returns a call that makes a ``Checkpointer`` at ``make(folder)``, a place beneath a temporary folder."""
    return within(lambda folder: Checkpointer(make(folder)))


def in_a_file(folder, *beneath):
    (folder / "note").write_text("no folder")
    return folder.joinpath("note", *beneath)


def to_nowhere(folder):
    (folder / "run").symlink_to(folder / "not mounted")
    return folder / "run"


def lock_is_a_link(folder):
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"n": 1})
    (lock,) = [path for path in folder.iterdir() if path.is_file()]
    lock.unlink()
    lock.symlink_to(folder / "elsewhere")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, {"n": 2})


def two_writers(folder):
    with Checkpointer(folder) as one, Checkpointer(folder) as other:
        one.save(1, {"n": 1})
        other.save(2, {"n": 2})


def emptied(use):
    """Returns a call that runs ``use(checkpointer)`` on steps 10 and 20, where step 20 is an empty folder."""

    def work(folder):
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(10, {"n": 10})
        (folder / "20").mkdir()
        with Checkpointer(folder) as checkpointer:
            use(checkpointer)

    return within(work)


def empty_alone(use):
    def work(folder):
        (folder / "20").mkdir()
        with Checkpointer(folder) as checkpointer:
            use(checkpointer)

    return within(work)


def other_state(directory):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(2, {"w": jnp.ones(3), "m": jnp.ones(3)})


def again(directory):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(10, {"a": 3})


def record_of(state, arrays):
    return with_sums(record_without_sums(state), checksum_each(arrays))


def another_optimizer(folder):
    def state(make, tx):
        return make(fsdp(nn.Dense)(4), tx, MESH, jax.random.key(0), BATCH["x"], batch_axes=AXES)

    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state(create_train_state, optax.adam(0.1)))
        checkpointer.restore(state(abstract_train_state, optax.radam(0.1)))


RECORD = to_json(record_of({"n": 3}, {"n": np.int64(3)}), step=7)


def record(number=7, **change):
    return lambda: from_json(RECORD | change, number)


# ----- safetensors


def exported(use, tree=None, **options):
    """Returns a call that exports leaves and runs ``use(folder)``."""

    def work(folder):
        export_safetensors(
            {"w": np.ones((3, 4), np.float32), "b": np.zeros(2, np.float32)} if tree is None else tree,
            folder,
            **options,
        )
        use(folder)

    return within(work)


def imported(change=None, **options):
    like = {"w": np.ones((3, 4), np.float32), "b": np.zeros(2, np.float32)} | (change or {})
    return exported(lambda folder: import_safetensors(folder, like, **options))


def exporting(tree, **options):
    return within(lambda folder: export_safetensors(tree, folder, **options))


def header(**fields):
    """Returns the header of a file with one tensor; ``fields`` are JSON."""
    entry = {"dtype": '"F32"', "shape": "[1]", "data_offsets": "[0,4]"} | fields
    return '{"w":{' + ",".join(f'"{name}":{value}' for name, value in entry.items()) + "}}"


def with_header(text, values=4):
    content = text if isinstance(text, bytes) else text.encode()

    def work(folder):
        (folder / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(values))
        import_safetensors(folder, {"w": np.ones(1, np.float32)})

    return within(work)


def with_bytes(change):
    """Returns a call that imports a file after a change of its bytes."""

    def work(folder):
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))
        import_safetensors(folder, {"w": np.ones((3, 4), np.float32), "b": np.zeros(2, np.float32)})

    return exported(work)


def with_index(change):
    """Returns a call that reads a model in several files after a change of the index's text."""
    three = {name: np.full(100, i, np.float32) for i, name in enumerate("abc")}

    def work(folder):
        index = folder / "model.safetensors.index.json"
        index.write_text(change(index.read_text()))
        import_safetensors(folder, three)

    return exported(work, three, max_file_bytes=400)


def in_two_files(folder):
    safetensors.numpy.save_file({"a": np.zeros(2), "b": np.zeros(2)}, folder / "one.safetensors")
    safetensors.numpy.save_file({"b": np.ones(2), "c": np.ones(2)}, folder / "two.safetensors")
    files = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    import_safetensors(folder, {name: np.zeros(2) for name in "abc"})


def a_folder(folder):
    (folder / "model.safetensors").mkdir()
    import_safetensors(folder, {"w": np.ones(1)})


THREE = {"w": np.zeros(100, np.float32), "b": np.zeros(2, np.float32)}


def published(use):
    """Publishes a version and a delta, and what ``use(folder)`` does there."""

    def work(folder):
        publish(THREE, folder)
        publish(THREE | {"w": np.eye(1, 100, dtype=np.float32)[0]}, folder, since=1)
        use(folder)

    return within(work)


def after_change(name, change):
    """Reads a publication after a change of the bytes of a file."""

    def work(folder):
        file = folder / name
        file.write_bytes(change(file.read_bytes()))
        apply_publication({}, folder)

    return published(work)


def with_layout(*rules):
    """Publishes tensors in a layout."""
    tree = {"a": np.ones((2, 3)), "b": np.ones((2, 4)), "e0": np.ones(1), "e2": np.ones(1)}
    return within(lambda folder: publish(tree, folder, layout=rules))


def out_of_layout(arrays, *rules):
    """Reads arrays in a layout of two rows ``a`` and ``b``."""
    like = {"a": np.ones((1, 3)), "b": np.ones((1, 3))}
    return lambda: from_layout(arrays, [Joined(("a", "b"), "ab"), *rules], like)


def imported_in_layout(written, *rules):
    """Imports a tensor of three rows from files with the tensors ``written``."""
    like = {"ab": np.ones((3, 2))}
    return exported(lambda folder: import_in_layout(folder, like, rules), written)


def with_single_file(folder):
    (folder / "model.safetensors").touch()
    publish(ONE, folder)


def without_base(folder):
    publish(THREE, folder, since=2)
    (folder / "model-00000002.delta.json").unlink()
    apply_publication({}, folder)


def no_boolean():
    text = b'{"w":{"dtype":"BOOL","shape":[4],"data_offsets":[0,4]}}'

    def work(folder):
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes([0, 1, 2, 0]))
        import_safetensors(folder, {"w": np.zeros(4, bool)})

    return within(work)


def joined_by_a_variable():
    os.environ["JAX_COORDINATOR_ADDRESS"] = "10.0.0.1:1234"
    try:
        initialize_distributed()
    finally:
        del os.environ["JAX_COORDINATOR_ADDRESS"]


KERNEL = {"a": {"kernel": np.zeros((4, 2))}}
ONE = {"w": np.ones(2)}
HOSTILE = [
    ("nested", '{"w":' + "[" * 200_000, "RecursionError"),
    ("float", header(shape="[1.0]"), "1.0 is no size"),
    ("text", header(shape='"1"'), "'1' is no size"),
    ("offsets", header(data_offsets='"04"'), "'0' is no size"),
    ("end", header(data_offsets="[0,8]"), "offsets of a tensor do not fit its shape"),
    ("infinite", header(shape="[1e999]"), "inf is no size"),
    ("negative", header(shape="[-1]"), "-1 is no size"),
    ("bool", header(shape="[true]"), "True is no size"),
    ("dims", header(shape="[" + "1," * 100_000 + "1]"), "has 100001 dims"),
    ("dtype", header(dtype='"F128"'), "has the dtype 'F128'"),
    ("dtype-list", header(dtype="[]"), "TypeError"),
    ("twice", header()[:-2] + ',"dtype":"F32"}}', "stands in it twice"),
    ("list", "[]", "TypeError"),
    ("utf-16", header().encode("utf-16"), "UnicodeDecodeError"),
]
ROWS = [
    # ----- steps and places
    checkpoints("save-negative", saved(lambda c: c.save(-10, {"a": 1})), ValueError, "step=… is negative", "step=-10"),
    checkpoints("restore-nothing", saved(lambda c: c.restore({"a": 1})), CheckpointError, "… holds no checkpoint"),
    checkpoints(
        "restore-another-step",
        saved(lambda c: c.restore({"a": 0}, 7), {"a": 1}, 5),
        CheckpointError,
        "… has no step",
        "has no step 7; it holds [5]",
    ),
    checkpoints(
        "save-backwards",
        saved(lambda c: c.close() or again(c.directory), {"a": 1}, 10),
        ValueError,
        "step … cannot be saved to",
        "which holds step 10 already",
    ),
    checkpoints(
        "save-another-state",
        saved(lambda c: c.close() or other_state(c.directory), {"w": jnp.ones(3)}),
        ValueError,
        "… is of another state than the one to save",
        "step 1 in ",
        "'m'",
    ),
    *[
        checkpoints(
            f"option-{name.replace('_', '-')}-zero",
            option(**{name: 0}),
            ValueError,
            "…=… must be at least 1",
            f"{name}=0",
        )
        for name in ["save_interval_steps", "max_to_keep", "async_timeout_s"]
    ],
    *[
        checkpoints(
            f"option-{name.replace('_', '-')}-text",
            option(**{name: "2"}),
            TypeError,
            "…=… is a …, and must be",
            f"{name}='2' is a str, and must be a whole number",
        )
        for name in ["save_interval_steps", "max_to_keep", "async_timeout_s"]
    ],
    checkpoints(
        "option-peer-timeout", option(peer_timeout_s=0), ValueError, "peer_timeout_s=… must be", "peer_timeout_s=0"
    ),
    checkpoints(
        "place-blank", lambda: Checkpointer(""), ValueError, "the directory of the checkpoints is ''", "name a folder"
    ),
    checkpoints(
        "place-file-url",
        lambda: Checkpointer("file:///x"),
        ValueError,
        "the directory … has the scheme",
        "'file:///x' has the scheme 'file://', which orbax does not know. It takes gs://",
    ),
    checkpoints(
        "place-other-url", lambda: Checkpointer("foo://x"), ValueError, "the directory … has the scheme", "'foo://'"
    ),
    checkpoints(
        "place-a-file",
        placed(in_a_file),
        ValueError,
        "the directory … … a file",
        "note is a file, and can hold no checkpoints",
    ),
    checkpoints(
        "place-beneath-a-file",
        placed(lambda folder: in_a_file(folder, "run")),
        ValueError,
        "the directory … … a file",
        "note/run lies beneath ",
        "note, which is a file",
    ),
    checkpoints(
        "place-link-to-nowhere",
        placed(to_nowhere),
        ValueError,
        "the directory … is not to be found",
        "which leads nowhere. Mount",
    ),
    checkpoints("two-writers", within(two_writers), CheckpointError, "another Checkpointer of this process"),
    checkpoints("lock-is-a-link", within(lock_is_a_link), CheckpointError, "… is a link or no regular file"),
    checkpoints(
        "restore-another-optimizer",
        within(another_optimizer),
        UserWarning,
        "…: '…' was saved with the optimizer",
        "'opt_state/0/count' was saved with the optimizer chain(scale_by_adam, scale",
        "restore_params",
    ),
    checkpoints(
        "newest-is-empty",
        emptied(lambda c: c.latest_step()),
        UserWarning,
        "step … is the newest in",
        "step 10 is the newest",
        "step 20 is damaged: its folder is empty",
    ),
    checkpoints(
        "restore-past-empty",
        emptied(lambda c: c.restore({"n": 0})),
        UserWarning,
        "step … in … is damaged and was passed over",
        "step 20 in",
        "Restored step 10 instead",
    ),
    checkpoints(
        "restore-the-empty",
        emptied(lambda c: c.restore({"n": 0}, 20)),
        CheckpointError,
        "no sound checkpoint in",
        "step 20 is damaged: its folder is empty. Nothing was restored",
    ),
    checkpoints(
        "newest-all-empty",
        empty_alone(lambda c: c.latest_step()),
        CheckpointError,
        "no sound checkpoint in",
        "step 20 is damaged",
    ),
    checkpoints(
        "restore-all-empty",
        empty_alone(lambda c: c.restore({"n": 0})),
        CheckpointError,
        "no sound checkpoint in",
        "step 20 is damaged",
        "Nothing was restored",
    ),
    # ----- what is restored
    *[
        checkpoints(f"restore-{name}", into(**change), ValueError, words, *says)
        for name, change, words, *says in [
            (
                "shape",
                {"w": jnp.ones((4, 3))},
                "… does not fit the abstract state",
                "step 1 in",
                "'w' was saved as float32[3, 4], and the abstract state has float32[4, 3]",
            ),
            (
                "dtype",
                {"w": jnp.ones((3, 4), jnp.bfloat16)},
                "… does not fit the abstract state",
                "'w' was saved as float32[3, 4]",
                "bfloat16[3, 4]",
            ),
            ("new-leaf", {"v": jnp.ones(3)}, "… does not fit the abstract state", "it has no 'v'"),
            (
                "lost-leaf",
                {"w": None},
                "… does not fit the abstract state",
                "it has 'w', which the abstract state has not",
            ),
            (
                "key",
                {"rng": jax.random.key(0, impl="rbg")},
                "… does not fit the abstract state",
                "'rng' was saved as key<fry>[]",
                "key<rbg>[]",
            ),
            ("number", {"n": 0.0}, "… does not fit the abstract state", "'n' was saved as int[]", "float[]"),
            (
                "narrow",
                {"n": jnp.zeros((), jnp.int8)},
                "'…' was saved as the Python number",
                "'n' was saved as the Python number 300, which is not a int8",
            ),
            (
                "sharding",
                {"w": jax.ShapeDtypeStruct((3, 4), jnp.float32)},
                "the abstract leaf '…'",
                "'w' of shape (3, 4) has no sharding",
                "8 devices",
            ),
        ]
    ],
    *[
        checkpoints(f"params-{name}", params(like, path), ValueError, words, *says)
        for name, like, path, words, *says in [
            (
                "of-two-parts",
                {"w": jnp.ones(3)},
                None,
                "… has …. Say with path=",
                "step 20 in",
                "more than one part called 'params': 'a/params/', 'b/params/'",
            ),
            (
                "shape",
                {"w": jnp.ones(4)},
                "a/params",
                "… does not fit the abstract state",
                "'a/params/w' was saved as float32[3]",
                "float32[4]",
            ),
            (
                "name",
                {"v": jnp.ones(3)},
                "a/params",
                "… does not fit the abstract state",
                "it has no 'a/params/v'; and it has 'a/params/w'",
            ),
            (
                "no-part",
                {"w": jnp.ones(3)},
                "c",
                "… has no part",
                "has no part 'c'; it has 'a', 'b', 'a/opt', 'a/params', 'b/params'",
            ),
            (
                "sharding",
                {"w": jax.ShapeDtypeStruct((3,), jnp.float32)},
                "a/params",
                "the abstract leaf '…'",
                "'w' of shape (3,) has no sharding",
            ),
        ]
    ],
    *[
        checkpoints(f"save-{name}", saving(state), error, words, *says)
        for name, state, error, words, *says in [
            (
                "string",
                {"a": {"name": "run"}},
                TypeError,
                "'…' is …; a checkpoint holds",
                "'a/name' is str; a checkpoint holds numbers",
            ),
            ("strings", {"a": np.array(["x"])}, TypeError, "'…' is …; a checkpoint holds", "'a' is an array of <U1"),
            (
                "byte-order",
                {"a": np.ones(2, ">f4")},
                TypeError,
                "'…' has the dtype …, which cannot",
                "'a' has the dtype >f4, which cannot be stored",
            ),
            ("large", {"a": 2**70}, ValueError, "'…' is the integer", "'a' is the integer 1180591620717411303424"),
            (
                "name-on-disk",
                {"a.b": 1, "a": {"b": 2}},
                ValueError,
                "the leaves … and …",
                "'a/b' and 'a.b' would have one name",
            ),
            ("same-path", {"a/b": 1, "a": {"b": 2}}, ValueError, "two leaves of the state", "same path"),
            ("blank-path", {"": 1, ".": 2}, ValueError, "two leaves of the state", "same path"),
            (
                "beneath",
                {"a": 1, "a/b/c": 2},
                ValueError,
                "the leaf … lies beneath",
                "the leaf 'a/b/c' lies beneath the leaf 'a'",
            ),
            (
                "masked",
                {"a": np.ma.masked_array([1, 2], [0, 1])},
                TypeError,
                "'…' is a masked array",
                "'a' is a masked array, whose mask would be lost",
            ),
            ("nothing", {}, ValueError, "the state has no leaves"),
        ]
    ],
    # ----- the record
    checkpoints(
        "record-changed",
        record(leaves={"n": RECORD["leaves"]["n"] | {"dtype": "bool"}}),
        ValueError,
        "the record of leaves does not",
        "have its digest",
    ),
    checkpoints(
        "record-other-step",
        record(8, step=8),
        ValueError,
        "the record's number of the step",
        "does not have its digest",
    ),
    checkpoints("record-other-digest", record(step_digest="0"), ValueError, "the record's number of the step"),
    checkpoints(
        "record-without-number",
        lambda: from_json({name: RECORD[name] for name in ("leaves", "digest")}, 7),
        ValueError,
        "the record's number of the step",
    ),
    checkpoints(
        "record-renamed",
        record(8),
        ValueError,
        "it was saved as step",
        "saved as step 7, and its folder was renamed, copied or linked to 8",
    ),
    checkpoints(
        "record-no-array",
        lambda: from_json(to_json({"w": 3}, 1), 1),
        ValueError,
        "…: the record has its digest",
        "'w': ",
        "does not describe an array",
    ),
    checkpoints(
        "record-no-leaves",
        lambda: from_json(to_json({}, 1), 1),
        ValueError,
        "the record has its digest, and",
        "holds no leaves",
    ),
    checkpoints(
        "read-otherwise",
        lambda: check_sound(record_of({"w": np.arange(6)}, {"w": np.arange(6)}), {"w": np.arange(1, 7)}),
        ValueError,
        "…: what was read does not",
        "'w': what was read does not have the checksum or dtype",
    ),
    # ----- safetensors
    tensors(
        "import-shape",
        imported({"w": np.ones((4, 3), np.float32)}),
        ValueError,
        "… does not fit the parameters",
        "'w' is float32[3, 4] in the file, and float32[4, 3] in abstract",
    ),
    tensors(
        "import-dtype",
        imported({"w": np.ones((3, 4), np.float16)}),
        ValueError,
        "… does not fit the parameters",
        "'w' is float32[3, 4] in the file, and float16[3, 4]",
    ),
    tensors(
        "import-new-leaf",
        imported({"a": {"v": np.ones(2)}}),
        ValueError,
        "… does not fit the parameters",
        "it has no 'a/v'",
    ),
    tensors(
        "import-lost-leaf",
        imported({"b": None}),
        ValueError,
        "… does not fit the parameters",
        "it has 'b', which the parameters have not",
    ),
    checkpoints(
        "import-sharding",
        imported({"b": jax.ShapeDtypeStruct((2,), jnp.float32)}),
        ValueError,
        "the abstract leaf '…'",
        "'b'",
        "has no sharding",
    ),
    tensors(
        "import-cut",
        with_bytes(lambda content: content[:-1]),
        ValueError,
        "… is damaged",
        "model.safetensors is damaged",
    ),
    tensors(
        "import-cut-header",
        with_bytes(lambda content: content[:20]),
        ValueError,
        "… is damaged",
        "model.safetensors is damaged",
    ),
    tensors(
        "import-overlap",
        with_header(header()[:-1] + "," + header()[1:].replace("w", "b")),
        ValueError,
        "… is damaged",
        "begins at byte ",
        ", and should at",
    ),
    *[
        tensors(
            f"import-header-{name}",
            with_header(text),
            ValueError,
            "… is damaged",
            "model.safetensors is damaged, ",
            says,
        )
        for name, text, says in HOSTILE
    ],
    tensors("import-no-boolean", no_boolean(), ValueError, "… is damaged", "'w' is BOOL and has the byte 2, and"),
    *[
        tensors(f"import-index-{name}", with_index(change), ValueError, words)
        for name, words, change in [
            ("name", "… does not fit its files", lambda text: text.replace('"b"', '"d"')),
            ("file", "… does not fit its files", lambda text: text.replace("00002-of", "00001-of")),
            ("key", "… is not the index", lambda text: text.replace('"weight_map"', '"weights"')),
            ("outside", "… is not the index", lambda text: text.replace("model-", "../model-")),
        ]
    ],
    tensors(
        "import-in-two-files",
        within(in_two_files),
        ValueError,
        "… does not fit its files",
        "tensor 'b' lies in one.safetensors and in two.safetensors, perhaps",
    ),
    tensors(
        "import-nothing",
        within(lambda folder: import_safetensors(folder, ONE)),
        FileNotFoundError,
        "there is no …, and no …",
        "model.safetensors, and no model.safetensors.index.json",
    ),
    tensors(
        "import-a-folder", within(a_folder), ValueError, "… is no regular file", "model.safetensors is no regular file"
    ),
    tensors(
        "ignore-no-expression",
        imported(ignore="("),
        ValueError,
        "…: … is no regular expression",
        "ignore: '(' is no regular expression (missing )",
    ),
    tensors(
        "ignore-number",
        imported(ignore=3),
        TypeError,
        "…: … is a …; a pattern is a text",
        "ignore: 3 is a int; a pattern is a text",
    ),
    tensors(
        "names-no-expression", imported(names={"(": "w"}), ValueError, "…: … is no regular expression", "names: '('"
    ),
    tensors(
        "names-number", imported(names={3: "w"}), TypeError, "…: … is a …; a pattern is a text", "names: 3 is a int"
    ),
    checkpoints(
        "export-bytes-text",
        exporting(ONE, max_file_bytes="5GB"),
        TypeError,
        "…=… is a …, and must be",
        "max_file_bytes='5GB' is a str",
    ),
    checkpoints(
        "export-bytes-float",
        exporting(ONE, max_file_bytes=5e9),
        TypeError,
        "…=… is a …, and must be",
        "max_file_bytes=5000000000.0",
    ),
    checkpoints(
        "export-bytes-zero", exporting(ONE, max_file_bytes=0), ValueError, "…=… must be at least 1", "max_file_bytes=0"
    ),
    tensors(
        "publish-beside-a-file",
        within(with_single_file),
        FileExistsError,
        "… exists, and readers would take it",
        "model.safetensors exists, and readers",
    ),
    tensors(
        "publish-since-nothing",
        within(lambda folder: publish(ONE, folder, since=3)),
        ValueError,
        "since=… cannot be built on",
        "since=3 cannot be built on: ",
        " has no version.",
    ),
    tensors(
        "follow-nothing",
        within(lambda folder: apply_publication({}, folder)),
        FileNotFoundError,
        "no version is published in",
        "no version is published in ",
    ),
    tensors(
        "follow-other-arrays",
        published(lambda folder: apply_publication({"w": np.ones(2)}, folder)),
        VersionNeededError,
        "version … in … applies to version",
        "version 2 in ",
        " applies to version 1, and the arrays",
    ),
    tensors(
        "follow-lost-version",
        published(without_base),
        FileNotFoundError,
        "… is missing, on which version",
        "model-00000002.delta.json is missing, on which version 3",
    ),
    tensors(
        "follow-index",
        after_change("model.safetensors.index.json", lambda content: content.replace(b"1", b"2")),
        ValueError,
        "… is damaged, or no index",
        "index.json is damaged, or no index that `publish` wrote",
    ),
    tensors(
        "follow-header",
        after_change("model-00000002-00000-00000.delta", lambda content: content.replace(b"pt", b"pu")),
        ValueError,
        "… is damaged",
        "00000.delta is damaged: its header is not that of version 2",
    ),
    tensors(
        "follow-values",
        after_change("model-00000001-00000-00000.safetensors", lambda content: content[:-1] + b"x"),
        ValueError,
        "'…' of version … in … is damaged",
        " of version 2 in ",
        " is damaged, in 'model-00000001-00000-00000.safetensors'",
    ),
    tensors(
        "follow-gaps",
        after_change("model-00000002-00000-00000.delta", lambda content: content[:-1] + b"\xff"),
        ValueError,
        "'…' of version … in … is damaged",
        " of version 2 in ",
        " is damaged, in 'model-0000000",
    ),
    tensors(
        "layout-missing",
        with_layout(Joined(("a", "x"), "ax")),
        ValueError,
        "layout: '…' is to be joined with",
        "layout: 'a' is to be joined with 'x', which",
    ),
    tensors(
        "layout-shapes",
        with_layout(Joined(("a", "b"), "ab")),
        ValueError,
        "layout: … of … do not fit together",
        "layout: 'a', 'b' of float64[2, 3], float64[2, 4] do not fit together along dim 0",
    ),
    tensors(
        "layout-numbers",
        with_layout(Stacked(r"e(?P<n>\d)", "e")),
        ValueError,
        "layout: the parts of",
        "layout: the parts of 'e' have the numbers [0, 2]",
    ),
    tensors(
        "layout-repeated",
        with_layout(Repeated("head", "embed")),
        ValueError,
        "layout: '…' is to repeat",
        "layout: 'head' is to repeat 'embed', which",
    ),
    tensors(
        "layout-name-twice",
        with_layout(Repeated("b", "a")),
        ValueError,
        "layout: two tensors would have the name",
        "layout: two tensors would have the name 'b'",
    ),
    tensors(
        "layout-split",
        with_layout(Divided("b", ("b0", "b1"), (1, 2))),
        ValueError,
        "layout: '…', ……, cannot be split into",
        "layout: 'b', float64[2, 4], cannot be split into 2 parts of sizes [1, 2] along dim 0",
    ),
    tensors(
        "layout-unstacked",
        with_layout(Joined(("a", "b"), "ab", 1), Unstacked("ab", "ab{n}")),
        ValueError,
        "layout: '…', ……, cannot be split into",
        "layout: 'ab', float64[2, 7], cannot be split into parts along its first dim. Divide it before",
    ),
    tensors(
        "layout-other-tensors",
        out_of_layout({"x": np.ones((2, 3))}),
        ValueError,
        "layout: … are tensors of the layout or",
        "layout: 'ab', 'x' are tensors of the layout or of the arrays, but not of both",
    ),
    tensors(
        "layout-other-shape",
        out_of_layout({"ab": np.ones((2, 4))}),
        ValueError,
        "layout: the tensor",
        "layout: the tensor 'ab' is float64[2, 4], and float64[2, 3] by the model's",
    ),
    tensors(
        "layout-tied-differ",
        out_of_layout({"ab": np.ones((2, 3)), "again": np.zeros((2, 3))}, Repeated("again", "ab")),
        ValueError,
        "layout: '…' repeats '…', and its values differ",
        "layout: 'again' repeats 'a', and its values differ",
    ),
    tensors(
        "layout-file-other-shape",
        imported_in_layout({"a": np.ones((1, 2)), "b": np.ones((3, 2))}, Divided("ab", ("a", "b"), (1, 2))),
        ValueError,
        "… does not fit the parameters",
        "does not fit the parameters: 'b' is [3, 2] in the file, and [2, 2] by the layout.",
    ),
    tensors(
        "layout-file-other-names",
        imported_in_layout({"a": np.ones((1, 2)), "x": np.ones((2, 2))}, Divided("ab", ("a", "b"), (1, 2))),
        ValueError,
        "… does not fit the parameters",
        "does not fit the parameters: it has no 'b'; and it has 'x', which the layout has not.",
    ),
    tensors(
        "layout-file-mixed-dtypes",
        imported_in_layout({"a": np.ones((1, 2)), "b": np.ones((2, 2), "f4")}, Divided("ab", ("a", "b"), (1, 2))),
        ValueError,
        "the parts of '…' have different dtypes",
        "the parts of 'ab' have different dtypes: 'a' is float64, and 'b' is float32.",
    ),
    tensors(
        "layout-file-tied-differ",
        imported_in_layout({"ab": np.ones((3, 2)), "again": np.zeros((3, 2))}, Repeated("again", "ab")),
        ValueError,
        "layout: '…' repeats '…', and its values differ",
        "layout: 'again' repeats 'ab', and its values differ",
    ),
    tensors(
        "export-again",
        exported(lambda folder: export_safetensors({"w": np.zeros(3)}, folder)),
        FileExistsError,
        "… exists; remove it",
        "model.safetensors exists",
    ),
    tensors(
        "export-metadata",
        exporting({"__metadata__": np.ones(2), "w": np.ones(2)}),
        ValueError,
        "'…' is the name of the metadata",
    ),
    tensors(
        "export-half-a-pair",
        exporting({"a": {"\ud83d": np.ones(2)}}),
        ValueError,
        "the leaf … has a name that is not Unicode",
        "the leaf 'a/\\ud83d'",
    ),
    *[
        tensors(
            f"export-{name}",
            exporting({"a": {"x": leaf}}),
            TypeError,
            "'…' of type … cannot be written",
            "'a/x' of type ",
        )
        for name, leaf in [("key", jax.random.key(0)), ("int4", np.zeros(2, "int4")), ("int", 3)]
    ],
    *[
        tensors(f"names-{name}", exporting(KERNEL, names=names), ValueError, words, *says)
        for name, names, words, *says in [
            ("no-pattern", {"other": "x"}, "no pattern of names is all of the path", "'a/kernel'; it has 'other'"),
            (
                "dims",
                {"a/kernel": Stored("x", "i o h -> o i h")},
                "'…' of shape … does not have the dims of",
                "'a/kernel' of shape (4, 2)",
            ),
            (
                "lost-dim",
                {"a/kernel": Stored("x", "i o -> o")},
                "'…' of shape … does not have the dims of",
                "'a/kernel' of shape (4, 2)",
            ),
            (
                "bracket",
                {"a/kernel": Stored("x", "i o -> (o i")},
                "'…' of shape … does not have the dims of",
                "'a/kernel' of shape (4, 2)",
            ),
            (
                "group",
                {"(.)/kernel": r"\2.weight"},
                "the name … does not fit",
                "'a/kernel' of shape (4, 2): its pattern has 1 groups",
            ),
            ("group-zero", {"(.)/kernel": r"\0.weight"}, "the name … does not fit", "its pattern has 1 groups"),
        ]
    ],
    tensors(
        "names-one-tensor",
        exporting({"a": np.ones(2), "b": np.ones(2)}, names={"a|b": "tied"}),
        ValueError,
        "'…' and '…' would both be the tensor",
        "'b' and 'a' would both be the tensor 'tied'",
    ),
    # ----- processes
    processes(
        "join-without-number",
        lambda: initialize_distributed("10.0.0.1:1234", 2),
        ValueError,
        "initialize_distributed got …",
        "but not process_id. Pass all three",
    ),
    processes(
        "join-text",
        lambda: initialize_distributed("10.0.0.1:1234", "2", 0),
        TypeError,
        "initialize_distributed got …",
        "write int(...) around it",
    ),
    processes(
        "join-beyond",
        lambda: initialize_distributed("10.0.0.1:1234", 2, 2),
        ValueError,
        "process_id=… is not",
        "process_id=2 is not one of 0 ... 1",
    ),
    processes(
        "join-no-cluster", joined_by_a_variable, ValueError, "JAX_COORDINATOR_ADDRESS=… is set", "'10.0.0.1:1234'"
    ),
    processes(
        "join-address",
        lambda: initialize_distributed("10.0.0.1", 2, 0),
        ValueError,
        "coordinator_address=… is not",
        "coordinator_address='10.0.0.1' is not host:port",
    ),
]
