"""Checkpoints near the devices: every few steps to the hosts' own disks, beside the far directory.

  save      every process   the shards of its devices   -->   a file on its own disk          (in the background)
                            the file   -->   the disk of a process in another slice           (unless a process there
                                                                                               holds the same shards)
  restore   every process   tells the others which shards of which steps lie on its disk
            where a disk lacks the process's shards   <--   a disk that has them
            the newest step of which every shard is on some disk, or the newest far step, is read and checked

A process's *layout* names the shards that it holds; processes of one layout (copies along another axis) hold the same.
A step is whole if the shards of each layout of the job lie on some disk. All is kept in

    <directory>/<run>/<place>/<layouts>/<layout>/<step>/

  run       a digest of the far directory: two runs may share a disk
  place     the number of the process among those of its host
  layouts   a digest of the layouts of all processes, and their number: with it a step can be told to be whole
"""

import dataclasses
import json
import os
import shutil
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.checkpointer import Checkpointer, at_least_1
from xlstm_jax.distributed.checkpoint.errors import CheckpointError
from xlstm_jax.distributed.checkpoint.folders import RECORD, UNFINISHED, Receiver, send
from xlstm_jax.distributed.checkpoint.shard_files import ShardFiles, bounds_of
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.processes.store import digest
from xlstm_jax.distributed.processes.together import allgather_text, fail_together
from xlstm_jax.wording import listed

KEPT = 2  # steps on a disk: while one is written, the one before must be whole
_DEPTH = 4  # of a step below the folder of a run


class Held(NamedTuple):
    """Shards on a disk: those of one layout, of one step."""

    place: str
    layouts: str
    layout: str
    step: int


@dataclasses.dataclass(frozen=True)
class Peer:
    """What a process tells the others.

    Attributes:
      layout: which shards its devices hold; "" if it has seen no state yet.
      host: the name of its host.
      fails_with: the slices, racks or hosts that it belongs to, the largest first, as far as known.
      address: of its ``Receiver``.
      held: what is on its disk.
    """

    layout: str
    host: str
    fails_with: list[Any]
    address: list[Any]
    held: list[Held]


class NearCheckpointer:
    """Saves states on the hosts' own disks, beside a ``Checkpointer`` that saves more rarely, and restores the newest.

    A near step survives the loss of any one process, host or slice. All processes call each method together.

    Args:
      directory: a folder on a disk of this host; one path on all hosts, or another in each process.
      far: saves to storage that outlives the hosts. A step that is due there is not saved near. Closed with this.
      save_interval_steps: the steps that this divides are saved near.
      fails_with: a name for what fails together with this process, a rack, say. None: its slice if JAX knows several
        slices, else its host, if there are several.
    Raises:
      ValueError, TypeError: as ``Checkpointer``.

    >>> import tempfile
    >>> far = Checkpointer(tempfile.mkdtemp(), save_interval_steps=100)
    >>> with NearCheckpointer(tempfile.mkdtemp(), far, save_interval_steps=10) as checkpointer:
    ...     [step for step in range(95, 125) if checkpointer.save(step, {"step": step})]
    ...     checkpointer.restore({"step": 0})
    [100, 110, 120]
    {'step': 120}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        far: Checkpointer,
        save_interval_steps: int,
        *,
        fails_with: str | None = None,
    ) -> None:
        self.save_interval_steps = at_least_1("save_interval_steps", save_interval_steps)
        self.far = far
        self._root = Path(os.path.abspath(directory), digest(str(far.directory)))
        self._fails_with = fails_with
        self._receiver: Receiver | None = None
        self._peers: list[Peer] = []
        self._near: Checkpointer | None = None
        self._layout: str | None = None  # that `_near` is for
        self._restored = False
        self._kept_to: int | None = None  # the next save removes near steps later than this; None: it removes none

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, state: PyTree, *, force: bool = False) -> bool:
        """Saves to the far directory if the step is due there or ``force``; else near, if it is due.

        Arguments, result and errors are those of ``Checkpointer.save``. A save that fails, the copy to another host
        included, raises at the next save. The first near save also raises a ``ValueError`` if whole near steps of this
        run are there and nothing was restored. The first save after a restore, of a later step, removes from the disks
        the near steps later than the restored step.
        """
        saved = self.far.save(step, state, force=force)
        if force or not step % self.far.save_interval_steps or step % self.save_interval_steps:
            if saved:
                self._remove_later_steps(step)
            return saved
        layout = layout_of(state)
        if self._near is None or self._layout != layout:
            self._open(layout)
            if not self._restored:
                self._refuse_older_run()
                self._kept_to = -1
        assert self._near is not None
        # Before the processes meet in the save: none of them has sent a copy of the new step by then.
        self._remove_later_steps(step)
        return self._near.save(step, state)

    def restore(self, abstract_state: PyTree, step: int | None = None) -> PyTree:
        """Reads the newest sound step, near or far, or ``step``; as ``Checkpointer.restore``, with its errors.

        Near steps fit the mesh that they were saved on; on another mesh the far steps count, with a warning if they are
        older. Another warning names a later near step that is not whole. Both stay on the disks until the next save.
        """
        self._open(layout_of(abstract_state))
        whole = whole_steps(self._peers)
        near = whole.get(self._layouts, set())
        far = {number for number, found in self.far.steps_of_process_0().items() if not found.problem}
        wanted = [
            (number, tier)
            for number in sorted(near | far, reverse=True)
            for tier, steps in ((self._read_near, near), (self.far.restore, far))
            if number in steps and step in (None, number)
        ]
        if step is None:
            newest = max((number for number, _ in wanted), default=-1)
            self._warn_of_parts(newest)
            if (lost := max(set().union(*whole.values()), default=-1)) > newest:
                instead = f"; step {newest} is restored" if wanted else ""
                warnings.warn(
                    f"near step {lost} was saved by other processes or on another mesh, and is passed over{instead}. "
                    f"To go on from {lost}, start the job as it was; the next save removes it.",
                    stacklevel=2,
                )
        if not wanted:
            return self.far.restore(abstract_state, step)  # says what is missing
        state, self._kept_to = self._first_sound(abstract_state, wanted)
        self._restored = True
        return state

    def latest_step(self) -> int | None:
        """The newest step, near or far, of which all shards are on some disk; ``restore`` finds out if it is sound.

        It warns of a later near step that is not whole.
        """
        self._meet(self._layout or "")
        steps = set().union(*whole_steps(self._peers).values())
        far = self.far.latest_step()
        newest = max(steps | ({far} if far is not None else set()), default=None)
        self._warn_of_parts(-1 if newest is None else newest)
        return newest

    def wait(self) -> None:
        """Waits until the last saves are on disk, near ones on both; raises a ``CheckpointError`` if one failed."""
        for tier in filter(None, (self._near, self.far)):
            tier.wait()

    def close(self) -> None:
        """Waits for the last saves, as ``wait`` does, and closes the far ``Checkpointer`` too."""
        try:
            self._close_near()
        finally:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = None
            self.far.close()

    # ------------------------------------------------------------------------------------------------- among processes

    @property
    def _place(self) -> str:
        return places(self._peers)[jax.process_index()]

    @property
    def _layouts(self) -> str:
        return layouts_name(peer.layout for peer in self._peers)

    def _meet(self, layout: str) -> None:
        """Tells the other processes of this one, and learns of them."""
        if self._receiver is None:
            self._receiver = Receiver(self._root, KEPT, self.far.peer_timeout_s)
        slices = getattr(jax.local_devices()[0], "slice_index", None)
        host = socket.gethostname()
        me = Peer(layout, host, [self._fails_with, slices, host], self._receiver.address, held_below(self._root))
        texts = allgather_text(json.dumps(dataclasses.asdict(me)), "meet for near steps", self.far.peer_timeout_s)
        found = [Peer(**json.loads(text)) for text in texts]
        self._peers = [dataclasses.replace(peer, held=[Held(*held) for held in peer.held]) for peer in found]

    def _open(self, layout: str) -> None:
        """Meets the other processes, and makes the ``Checkpointer`` of this process's folder for its layout."""
        fail_together(self._close_near, CheckpointError, "finish the last near save", self.far.peer_timeout_s)
        # Once nothing is being sent: what lies on the disks is then what each process says.
        self._meet(layout)
        self._layout = layout
        own = self._root / self._place / self._layouts / layout
        backend = partial(ShardFiles, copy=self._copy)
        far = self.far
        self._near = _OnOwnDisk(own, 1, KEPT, far.async_timeout_s, peer_timeout_s=far.peer_timeout_s, backend=backend)
        # The folder has another path in each process, and the place is one name for all.
        self._near.place = f"near {far.directory}"
        for left in (self._root / self._place).glob(f"*/*/*{UNFINISHED}"):  # by a killed job
            shutil.rmtree(left)

    def _close_near(self) -> None:
        near, self._near = self._near, None
        if near is not None:
            near.close()

    def _refuse_older_run(self) -> None:
        if steps := set().union(*whole_steps(self._peers).values()):
            raise ValueError(
                f"{self._root.parent} holds near step {max(steps)} of {self.far.directory}, and nothing was restored. "
                "Restore, and go on from there; or remove the near directory on all hosts."
            )

    def _warn_of_parts(self, newest: int) -> None:
        """Warns of the newest step of which only parts are on the disks, if it is later than ``newest``."""
        whole = whole_steps(self._peers)
        everything = [held for peer in self._peers for held in peer.held]
        parts = {(held.step, held.layouts) for held in everything if held.step not in whole.get(held.layouts, ())}
        step, layouts = max(parts, default=(-1, ""))
        if step <= newest:
            return
        there = {held.layout for held in everything if (held.step, held.layouts) == (step, layouts)}
        lack = [f"process {process}" for process, peer in enumerate(self._peers) if peer.layout not in there]
        whose = listed(lack) if layouts == self._layouts else "processes that are not there"
        count = layouts.rpartition("-")[2]
        warnings.warn(
            f"near step {step} is not whole, and is passed over: {len(there)} of its {count} parts are on the disks; "
            f"none has the shards of {whose}. If a host is missing, start the job again with it; the next save removes "
            "the step. (A job that was killed while it saved leaves such a step, too.)",
            stacklevel=3,
        )

    def _remove_later_steps(self, step: int) -> None:
        """Removes what is later than the restored step from this process's folders, if ``step`` goes on from there."""
        if self._kept_to is None or step <= self._kept_to:
            return
        for held in held_below(self._root):
            if held.place == self._place and held.step > self._kept_to:
                shutil.rmtree(self._folder(held))
        self._kept_to = None

    def _folder(self, held: Held) -> Path:
        return self._root.joinpath(*map(str, held))

    def _copy(self, step: int) -> None:
        """Sends this process's shards of a step to the disk of another process, if that is needed."""
        me = jax.process_index()
        if (buddy := buddies(self._peers)[me]) is not None:
            self._send(Held(self._place, self._layouts, self._peers[me].layout, step), buddy)

    def _send(self, held: Held, to: int) -> None:
        there = held._replace(place=places(self._peers)[to])
        send(self._folder(held), self._peers[to].address, "/".join(map(str, there)), self.far.peer_timeout_s)

    # --------------------------------------------------------------------------------------------------------- restore

    def _first_sound(
        self, target: PyTree, wanted: Sequence[tuple[int, Callable[[PyTree, int], PyTree]]]
    ) -> tuple[PyTree, int]:
        problems = []
        for number, read in wanted:
            try:
                state = read(target, number)
            except CheckpointError as error:
                problems.append(f"step {number}: {error}")
                continue
            for problem in problems:
                warnings.warn(f"a step was passed over, and step {number} restored: {problem}", stacklevel=3)
            return state, number
        raise CheckpointError(f"no sound checkpoint, near or far: {' '.join(problems)} Nothing was restored.")

    def _read_near(self, target: PyTree, step: int) -> PyTree:
        assert self._near is not None
        moves = transfers(self._peers, step)

        def send_own() -> None:
            for held, sender, receiver in moves:
                if sender == jax.process_index():
                    self._send(held, receiver)

        what = f"bring step {step} to the disks that lack it"
        fail_together(send_own, CheckpointError, what, self.far.peer_timeout_s)
        return self._near.restore(target, step)


class _OnOwnDisk(Checkpointer):
    """A ``Checkpointer`` whose directory is another one in each process."""

    on_own_disk = True


# ------------------------------------------------------------------------------------------------------ what goes where


def layout_of(state: PyTree) -> str:
    """A digest of the shards that this process holds of a state, or that a target wants of it."""
    split = {}
    for path, leaf in leaves_with_path(state):
        value = leaf_of(leaf).value
        if (sharding := getattr(value, "sharding", None)) is None:
            continue
        indices = sharding.addressable_devices_indices_map(value.shape).values()
        bounds = sorted({bounds_of(index, value.shape) for index in indices})
        # A whole leaf says nothing, and may be a Python number in a target.
        if bounds != [tuple((0, size) for size in value.shape)]:
            split[path] = bounds
    return digest(json.dumps(split, sort_keys=True))


def layouts_name(layouts: Iterable[str]) -> str:
    """As "1f0c-3": a digest of all layouts, and how many there are."""
    found = sorted(set(layouts))
    return f"{digest(json.dumps(found))}-{len(found)}"


def held_below(root: Path) -> list[Held]:
    """What lies on this host's disk."""
    folders = [record.parent.relative_to(root).parts for record in root.glob(f"{'*/' * _DEPTH}{RECORD}")]
    return sorted(Held(place, all_, own, int(step)) for place, all_, own, step in folders if step.isdecimal())


def whole_steps(peers: Sequence[Peer]) -> dict[str, set[int]]:
    """The steps of which the shards of all layouts lie on some disk, by ``layouts``."""
    shards = {(held.layouts, held.step, held.layout) for peer in peers for held in peer.held}
    counts = Counter((layouts, step) for layouts, step, _ in shards)
    whole: dict[str, set[int]] = {}
    for (layouts, step), count in counts.items():
        if count == int(layouts.rpartition("-")[2]):
            whole.setdefault(layouts, set()).add(step)
    return whole


def places(peers: Sequence[Peer]) -> list[str]:
    """For each process its number among those of its host."""
    return [str([peer.host for peer in peers[:i]].count(peer.host)) for i, peer in enumerate(peers)]


def buddies(peers: Sequence[Peer]) -> list[int | None]:
    """For each process the process whose disk gets a copy of its shards.

    None if processes that do not fail with it hold the same shards, or if there are no other processes.
    """
    # The largest parts that there are several of: slices, else racks or hosts, else processes.
    named = (names for names in zip(*(peer.fails_with for peer in peers), strict=True) if len(set(names)) > 1)
    groups = [str(name) for name in next(named, (f"{process:06}" for process in range(len(peers))))]
    ring = sorted(range(len(peers)), key=lambda process: groups[process])
    # So far on in the ring no process fails with this one, unless more than half of all do.
    stride = max(Counter(groups).values())
    found: list[int | None] = [None] * len(peers)
    for i, me in enumerate(ring):
        further = [ring[(i + stride + k) % len(ring)] for k in range(len(ring))]
        others = [other for other in further if groups[other] != groups[me]]
        if not any(peers[other].layout == peers[me].layout for other in others):
            found[me] = next(iter(others), None)
    return found


def transfers(peers: Sequence[Peer], step: int) -> list[tuple[Held, int, int]]:
    """(what, from which process, to which) so that every process has its shards of a whole step in its own folder."""
    layouts, moves = layouts_name(peer.layout for peer in peers), []
    for me, (peer, place) in enumerate(zip(peers, places(peers), strict=True)):
        own = Held(place, layouts, peer.layout, step)
        if own in peer.held:
            continue
        there = [(other, held) for other, p in enumerate(peers) for held in p.held if held[1:] == own[1:]]
        sender, held = there[me % len(there)]
        moves.append((held, sender, me))
    return moves
