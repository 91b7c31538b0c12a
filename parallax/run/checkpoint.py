"""Checkpoints that can be trusted: Orbax writes the arrays, and a manifest with a hash of every file says what was written.

Orbax is sharded, asynchronous, atomic, and works in many processes on one shared folder; it does not notice a bit that turned.
Here a checkpoint counts only with its manifest, which is written last. What fails its check is refused by name, the newest good
one is restored, and nothing good is ever replaced by something worse. A state that is not finite is neither stored nor restored:

    folder/00000100/arrays/...       Orbax's files
    folder/00000100/contents.json    step, settings, note, plain numbers, names and shapes of the arrays; written first
    folder/00000100/manifest.json    the same, with the size and sha256 of every file; written last
    folder/newest.json               the newest step ever finished, so that no run begins again unseen

The arrays are stored by their path in the tree, whole, whatever mesh they came from, and come back in the shardings asked for.
"""

import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils

from parallax.data import manifest
from parallax.run import kept, lock, stored
from parallax.run import record as records
from parallax.run.kept import NEWEST
from parallax.run.record import ARRAYS, MANIFEST, Record
from parallax.run.stages import LONG, Elsewhere, Stages
from parallax.typed import PyTree

NONE = -1  # no checkpoint, where a step is told to other processes
TOLD = 1000  # bytes of what one process tells the others
PAUSE = 1.0  # seconds until a save is tried again for the first time; each time twice as long
_made = itertools.count()  # `Checkpoints`, in the same order on all processes


class Refused(ValueError):
    """The folder holds checkpoints, and none may be restored. The message names each with its reason."""


class Restored(NamedTuple):
    """A checkpoint that was restored.

    Attributes:
        step: its number.
        state: as asked for: the tree, shapes, dtypes and shardings of `like`.
        note: the JSON values that were saved with it.
        refused: why newer ones were not restored, by step.
    """

    step: int
    state: PyTree
    note: dict[str, Any]
    refused: dict[int, str]


class Checkpoints:
    """The checkpoints of one run, in one folder that all processes see. Every process makes the same calls.

        with Checkpoints(folder, settings={"width": 128, "seed": 0}) as checkpoints:
            restored = checkpoints.restore(state)          # None: the folder is new
            ...
            if checkpoints.due(step):
                checkpoints.save(step, state)              # returns as soon as the state is copied

    Needs `pip install "parallax-jax[checkpoint]"`. From `with` on, the folder is this run's alone: another one that wants to
    write is refused with `lock.Held`. Reading needs no lock, and no `with`.

    Args:
        folder: is made where it is missing.
        settings: what the run's numbers depend on (not its layout), as JSON values. A checkpoint with other settings is
            another run's and is refused, with what differs.
        lose_at_most: steps that a job killed at any moment may have to compute again. A save takes its time beside the steps,
            so one begins every half of these, and ends before the next begins.
        keep: how many of the newest checkpoints stay.
        keep_every: the checkpoints of steps that are multiples of this one stay for good.
        to_disk: from a state to the form that all layouts share, of arrays by `jax.numpy` alone; it is compiled. The default
            stores the state as it is. For a pipeline, what joins the blocks of its chunks, as `decoder.stored` gives it.
        from_disk: its inverse.
        finite: which arrays must be finite, by their path: no others are stored or restored. By default all; a mask of -inf, or
            an optimizer's best value that begins at inf, may be left out.
        tries: how often a save is tried where the storage fails for a while (no space, no permission, an error of the disk or of
            the network): after 1 s, and each time after twice as long, beside the steps; 8 take two minutes. Until a save is
            finished each process keeps its blocks in the host's memory for that; with 1 it does not.
        say: prints a line on the first process, or on the one that met an error.

    Raises:
        ValueError: `keep`, `keep_every` or `tries` is below 1, `lose_at_most` below 2, or one of `to_disk` and `from_disk` is
            given without the other.
        ImportError: Orbax is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        settings: Mapping[str, Any],
        lose_at_most: int = 100,
        keep: int = 3,
        keep_every: int | None = None,
        to_disk: Callable[[PyTree], PyTree] | None = None,
        from_disk: Callable[[PyTree], PyTree] | None = None,
        finite: Callable[[str], bool] = lambda path: True,
        tries: int = 8,
        say: Callable[[str], Any] = print,
    ):
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"Checkpoints needs keep and keep_every of 1 or more; got keep={keep}, keep_every={keep_every}.")
        if tries < 1:
            raise ValueError(f"Checkpoints needs tries of 1 or more; got {tries}.")
        if lose_at_most < 2:
            raise ValueError(
                f"Checkpoints needs lose_at_most of 2 steps or more; got {lose_at_most}. To lose 1, save and wait after each."
            )
        if (to_disk is None) != (from_disk is None):
            raise ValueError("Checkpoints needs both to_disk and from_disk, each the inverse of the other, or neither.")
        self.folder = Path(folder).absolute()
        self.settings = json.loads(json.dumps(settings))
        self.lose_at_most, self.keep, self.keep_every = lose_at_most, keep, keep_every
        self.to_disk, self.from_disk, self.finite = to_disk, from_disk, finite
        self.refused: dict[int, ValueError] = {}
        self._saved = eqx.filter_jit(to_disk or (lambda state: state))
        self.tries = tries
        self._say_here, self._say = say, say if jax.process_index() == 0 else lambda line: None
        self._name, self._saves = f"parallax checkpoints {next(_made)}", itertools.count()
        self._meetings = itertools.count()
        self._meet = _orbax().multihost.get_barrier_sync_fn()
        self._stages = Stages(self._name, self._meet)
        self._arrays = self._checkpointer()
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock: lock.Lock | None = None
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        if jax.process_index() == 0 and self._lock is None:
            self._lock = lock.take(self.folder, say=self._say)
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                self.wait()
        finally:
            # After an error a writer may hang for its peers: whoever ends the process ends it too, and its lock. Until then the
            # folder stays this run's, which may come back to it.
            if self._lock is not None and not self.saving():
                self._lock.release()
                self._lock = None

    # Saving

    def due(self, step: int) -> bool:
        """Whether a save should begin after `step`, for no kill to lose more than `lose_at_most` steps."""
        return step % (self.lose_at_most // 2) == 0

    def save(self, step: int, state: PyTree, note: Mapping[str, Any] | None = None, *, evaluated: float | None = None) -> None:
        """Store `state` as the checkpoint of `step`, in the background: it may be donated as soon as this returns.

        Waits for the save before it. What went wrong in the background is raised by the next `save`, `check` or `wait`.

        Args:
            state: arrays, random keys and plain numbers are stored; the rest (functions, flags of a module) is not, and comes
                from the state that `restore` is given.
            note: JSON values to come back with the state, such as the counts of the loop.
            evaluated: a loss that was measured of this state, on held-out data. The newest checkpoint with one that is finite
                stays until there is a newer one.

        Raises:
            ValueError: an array is not finite; or the folder holds a finished checkpoint of this step or of a later one, and it
                was not refused.
            OSError: the disk is full, say; the message names the folder and the newest good checkpoint.
        """
        self.wait()
        arrays, numbers = stored.stored(state if self.to_disk is None else self._saved(state))
        if lost := self._lost(arrays):
            raise ValueError(
                f"The state of step {step} is not finite, and was not saved: {_listed(lost)}. {self._newest_words()}"
            )
        # The note as it is now: the writer's thread comes to it later.
        noted = json.loads(json.dumps(dict(note or {})))
        described = {name: stored.described(leaf) for name, leaf in arrays.items()}
        loss = None if evaluated is None or not math.isfinite(evaluated) else float(evaluated)
        record = Record(step, self.settings, noted, numbers, described, loss)
        plain = {name: stored.plain(leaf) for name, leaf in arrays.items()}
        copies = stored.held(plain) if self.tries > 1 else lambda: plain
        name, error = f"{self._name}, save {next(self._saves)}", None
        self._stages = Stages(name, self._meet)
        try:
            self._begin(step, record, plain)
        except kept.Later:
            raise
        except Exception as failure:
            if not self._stages.failed(failure):
                raise self._failed(step, failure) from failure
            error = failure
        arguments = name, step, record, copies, error
        self._writer = threading.Thread(target=self._finish, args=arguments, name=f"checkpoint {step}", daemon=True)
        self._writer.start()

    def saving(self) -> bool:
        """Whether a save goes on in the background."""
        return self._writer is not None and self._writer.is_alive()

    def check(self) -> None:
        """Raise what went wrong in the background; costs nothing, so call it every step."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return when the last save is finished, with its manifest. Raises what went wrong in it, as `check` does."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.check()

    def _begin(self, step: int, record: Record, arrays: dict[str, Any]) -> None:
        """Make the folder, and hand the arrays to Orbax, which copies them before it returns."""

        def make():
            kept.make_room(self.folder, step, self.settings, self.refused)
            records.begin(self._path(step), record)

        self._stages.first(make)
        self._arrays.save(self._path(step) / ARRAYS, args=_orbax().args.PyTreeSave(arrays))

    def _begin_again(self, step: int, record: Record, arrays: dict[str, Any]) -> None:
        """`_begin`, without what the last time left: it may be what fills the disk, and Orbax does not go on after a failure."""
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                kept.remove(self._path(step))
        self._arrays = self._checkpointer()
        self._begin(step, record, arrays)

    def _finish(
        self, name: str, step: int, record: Record, copies: Callable[[], dict[str, Any]], begun: Exception | None
    ) -> None:
        """The writer's thread: Orbax's files are committed, hashed, and sealed by the manifest; then old ones go.

        Where the storage fails, what is not done yet is done again after a pause. `begun` says how `_begin` failed, if it did.
        """
        written = False
        for number in itertools.count(1):
            try:
                if number == 1 and begun is not None:
                    raise begun
                if number > 1:
                    self._stages = Stages(f"{name}, try {number}", self._meet)
                    if not written:
                        self._begin_again(step, record, copies())
                if not written:
                    self._arrays.wait_until_finished()
                    written = True
                self._stages.first(lambda: self._seal(step, record))
                return
            except BaseException as failure:
                error, pause = self._failed(step, failure), PAUSE * 2 ** (number - 1)
                if not self._stages.failed(failure) or number == self.tries:
                    self._error = error
                    return
                if not isinstance(failure, Elsewhere):
                    self._say_here(f"{error} The next of {self.tries} tries is in {pause:g} s; the run goes on meanwhile.")
            time.sleep(pause)

    def _seal(self, step: int, record: Record) -> None:
        records.seal(self._path(step), record)
        manifest.write(self.folder / NEWEST, {"step": step})
        self.refused.pop(step, None)
        kept.thin(self.folder, self.settings, self.refused, keep=self.keep, keep_every=self.keep_every)

    def _checkpointer(self) -> Any:
        checkpoint = _orbax()
        # Weights hardly compress, and trying takes more processor time than all the rest of a save.
        handler = checkpoint.PyTreeCheckpointHandler(use_compression=False)
        # All processes, by name: Orbax then meets at the coordinator too, and may begin in the background.
        processes = set(range(jax.process_count()))
        together = checkpoint.options.MultiprocessingOptions(active_processes=processes, barrier_sync_key_prefix=self._name)

        def meet(key: str, timeout_ms: int) -> None:  # Orbax's own stages
            self._stages.end()

        # Folders at once: where one cannot be made in the background, Orbax waits for it for 5 minutes.
        ends = checkpoint.options.AsyncOptions(barrier_sync_fn=meet, create_directories_asynchronously=False)
        return checkpoint.AsyncCheckpointer(handler, async_options=ends, multiprocessing_options=together)

    def _failed(self, step: int, error: BaseException) -> OSError:
        words = f"The checkpoint of step {step} in {self._path(step)} was not saved: {error}"
        failure = OSError(f"{words} {self._newest_words()}")
        failure.__cause__ = error  # `processes.run` asks whether a peer is the cause
        return failure

    def _newest_words(self) -> str:
        good = self.steps()
        return f"The newest finished one is {self._path(good[-1])}." if good else "There is no finished one yet."

    def _lost(self, arrays: dict[str, Any]) -> list[str]:
        return stored.not_finite({name: leaf for name, leaf in arrays.items() if self.finite(name)})

    # Restoring

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints, oldest first: those with a manifest, whatever it says."""
        return kept.finished(self.folder)

    def restore(self, like: PyTree, *, before: int | None = None) -> Restored | None:
        """The newest good checkpoint of this run, or `None` where the folder never held a finished one.

        All files are checked against the manifest before an array is read (2 GB/s a core), a share of them by each process. That
        may take as long as it takes: no device waits meanwhile.

        Args:
            like: a state with the tree, shapes, dtypes and shardings to restore to, of arrays or `jax.ShapeDtypeStruct`s.
            before: pass over the checkpoints of this step and later ones, where there is an earlier one; the run then goes on
                behind them, and they go as it does.

        Raises:
            Refused: there were checkpoints, and none is good; the message says of each why. Nothing begins again unseen.
            ValueError: the checkpoint is good, and its arrays are not those of `like`; the message names the leaf.
        """
        self.wait()
        self.refused = {}
        if before is not None and any(step < before for step in self.steps()):
            asked = f"a checkpoint from before step {before} was asked for"
            later = (step for step in self._seen()[0] if step >= before)
            self.refused |= {step: manifest.Damaged(f"{self._path(step)}: {asked}.") for step in later}
        while True:
            step = self._of_first(self._newest_good() if jax.process_index() == 0 else NONE)
            if step == NONE:
                return None
            record, files = records.read(self._path(step))
            try:
                if why := self._wrong(step, files):
                    self._refuse(step, why)
                    continue
                state = self._read(step, record, like)
            except manifest.Damaged as error:
                self._refuse(step, error)
                continue
            self._say(f"restored step {step} from {self._path(step)}")
            return Restored(step, state, record.note, {other: str(why) for other, why in self.refused.items()})

    def _of_first(self, step: int) -> int:
        """The step that the first process gives."""
        self._come()
        return int(multihost_utils.broadcast_one_to_all(np.asarray(step, np.int32))) if jax.process_count() > 1 else step

    def _come(self) -> None:
        """Return when all processes have come here, however long that takes: what they do next together takes no time."""
        self._meet(key=f"{self._name}, meeting {next(self._meetings)}", timeout_ms=round(LONG * 1000))

    def _wrong(self, step: int, files: dict[str, list]) -> ValueError | None:
        """What is wrong with the files of a checkpoint, on all processes; each has hashed its share of them."""
        by_size, found = sorted(files, key=lambda name: (-files[name][0], name)), ""
        try:
            share = by_size[jax.process_index() :: jax.process_count()]
            manifest.check_hashes(self._path(step), {name: files[name] for name in share})
        except manifest.Damaged as error:
            found = f"damaged: {error}"
        except OSError as error:
            found = f"unread: {_unreadable(error, self._path(step))}"
        if jax.process_count() > 1:
            self._come()
            told = multihost_utils.process_allgather(np.frombuffer(found.encode()[:TOLD].ljust(TOLD), np.uint8))
            found = next(filter(None, (bytes(each).decode(errors="replace").rstrip() for each in told)), "")
        kind, _, words = found.partition(": ")
        return {"": None, "damaged": manifest.Damaged(words), "unread": ValueError(words)}[kind]

    def _refuse(self, step: int, why: ValueError) -> None:
        self.refused[step] = why
        self._say(f"refused the checkpoint of step {step}: {why}")

    def _newest_good(self) -> int:
        """The newest step whose checkpoint is one, as far as names and sizes tell, and was not refused. Others are refused."""
        steps, reasons = self._seen()
        for step in reversed(steps):
            if step not in self.refused:
                try:
                    self._verify(step)
                except RecursionError:
                    nested = f"{self._path(step) / MANIFEST}: needed a manifest, got one nested too deep to compare."
                    self._refuse(step, manifest.Damaged(nested))
                except OSError as error:
                    self._refuse(step, ValueError(_unreadable(error, self._path(step))))
                except ValueError as error:
                    self._refuse(step, error)
                else:
                    return step
            reasons += f"\n  step {step}: {self.refused[step]}"
        if not (self.folder / NEWEST).exists() and not self.steps():
            return NONE
        raise Refused(
            f"{self.folder} held finished checkpoints, and none of them may be restored:{reasons}\n"
            "Give back what is missing, or choose another folder to begin again."
        )

    def _seen(self) -> tuple[list[int], str]:
        """Every step that a folder or the newest manifest speaks of, oldest first; and what is wrong with the latter, a line."""
        steps = {step for path in self.folder.iterdir() if path.is_dir() and (step := kept.step_of(path)) is not None}
        if (self.folder / NEWEST).exists():
            try:
                steps.add(records.newest(self.folder / NEWEST))
            except manifest.Damaged as error:
                self._say(str(error))
                return sorted(steps), f"\n  {error}"
        return sorted(steps), ""

    def _verify(self, step: int) -> None:
        folder = self._path(step)
        if not folder.exists():
            raise manifest.Damaged(f"{folder}: needed a folder, found none. It was removed.")
        if not (folder / MANIFEST).exists():
            raise manifest.Damaged(
                f"{folder / MANIFEST}: found no file. The checkpoint was not finished, or has lost its manifest."
            )
        record, files = records.read(folder)
        if record.step != step:
            raise manifest.Damaged(f"{folder / MANIFEST}: needed the manifest of step {step}, got that of step {record.step}.")
        differing = differences(record.settings, self.settings)
        if differing:
            raise ValueError(f"{folder}: it is of another run, which had {differing}. Set them so, or choose another folder.")
        records.check_form(folder, record, files)

    def _read(self, step: int, record: Record, like: PyTree) -> PyTree:
        like = stored.shapes(like)
        wanted = like if self.to_disk is None else stored.converted(self.to_disk, like)
        arrays, numbers = stored.stored(wanted)
        stored.check_same(self._path(step), record, {name: stored.described(leaf) for name, leaf in arrays.items()}, numbers)
        template = {name: stored.plain(leaf) for name, leaf in arrays.items()}
        shardings = _orbax().checkpoint_utils.construct_restore_args(template)
        found = self._arrays.restore(self._path(step) / ARRAYS, args=_orbax().args.PyTreeRestore(template, shardings))
        self._come()
        if lost := self._lost(found):
            raise manifest.Damaged(f"{self._path(step)}: needed a finite state; nan or inf is in {_listed(lost)}.")
        state = stored.found(wanted, found, record.numbers)
        if self.from_disk is None:
            return state
        return stored.placed(self.from_disk, state, like)

    def _path(self, step: int) -> Path:
        return kept.path_of(self.folder, step)


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What two runs' settings differ in, in words: `width=64 (here 128)`. Empty where they agree."""
    absent = object()
    words = lambda value: "none" if value is absent else repr(value)
    pairs = ((name, theirs.get(name, absent), ours.get(name, absent)) for name in sorted({*theirs, *ours}))
    return ", ".join(f"{name}={words(a)} (here {words(b)})" for name, a, b in pairs if a != b)


def _unreadable(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: it cannot be read; {error.strerror}."


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError('Checkpoints are written by Orbax: pip install "parallax-jax[checkpoint]".') from error
    return orbax.checkpoint
