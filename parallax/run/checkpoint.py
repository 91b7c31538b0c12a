"""Checkpoints that can be trusted: Orbax writes the arrays, and a manifest lists all files with
their hashes.

Orbax writes shards from many processes into one shared folder, in the background, and a checkpoint
appears whole or not at all. But Orbax does not notice a changed bit. Here a checkpoint counts only
with its manifest, which is written last. A checkpoint that fails its check is refused with a
message, and the newest good checkpoint is restored. A state with nan or inf is neither stored nor
restored. A folder has these files:

    folder/00000100/arrays/...       Orbax's files
    folder/00000100/contents.json    step, settings, note, plain numbers, names and shapes of the
                                     arrays; written first
    folder/00000100/manifest.json    the same, with the size and hash of every file; written last
    folder/newest.json               the newest step that the run has finished: if all checkpoints
                                     are gone, a run does not silently begin again; and later steps
                                     that the run gave up when it went back

Each array is stored whole, under its path in the state's tree, so it can be restored to any mesh.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils

from parallax import argument_checks, mesh
from parallax._typing import PyTree
from parallax.data import manifest
from parallax.run import lock, retention, stored
from parallax.run import record as records
from parallax.run.barriers import LONG
from parallax.run.record import ARRAYS, MANIFEST, Record
from parallax.run.retention import NEWEST, Retention
from parallax.run.writer import Writer, orbax
from parallax.trees import DiskForm

NONE = -1  # in place of a step that the first process sends to the others: no checkpoint
TOLD = 1000  # bytes of an error that one process sends to the others
_made = itertools.count()  # numbers the `Checkpoints` objects, in one order on all processes


class Refused(ValueError):
    """Raised if the folder holds checkpoints, and none may be restored. The message names each
    checkpoint with the reason.
    """


class Restored(NamedTuple):
    """A checkpoint that was restored.

    Attributes:
        step: the number of the step.
        state: the state, with the tree, shapes, dtypes and shardings of `like`, the argument of
            `Checkpoints.restore`.
        note: the JSON values that were saved with the state.
        refused: a dict from the step of each newer checkpoint to the reason why this checkpoint
            was not restored.
    """

    step: int
    state: PyTree
    note: dict[str, Any]
    refused: dict[int, str]


class Checkpoints:
    """Saves and restores the checkpoints of one run, in one folder that all processes see. Every
    process makes the same calls.

        with Checkpoints(folder, settings={"width": 128, "seed": 0}) as checkpoints:
            restored = checkpoints.restore(state)          # None: the folder is new
            ...
            if checkpoints.due(step):
                checkpoints.save(step, state)              # returns as soon as the state is copied

    The class needs `pip install -e ".[checkpoint]"`. Inside `with`, the run holds the lock on the
    folder, and another run that wants to write there is refused with `lock.Held`. Reading needs no
    lock, and no `with`.

    Args:
        folder: the folder of the checkpoints; it is made if it is missing.
        settings: the settings on which the results of the run depend, as JSON values, without the
            layout. A checkpoint with other settings belongs to another run and is refused; the
            message names the differences.
        lose_at_most: the most steps that must be computed again if the job is killed at any moment.
            Saves run in the background: one begins every `lose_at_most` / 2 steps, and must end
            before the next save begins.
        keep: says which finished checkpoints are not removed.
        form: two functions that convert the state to the stored form, and back. The stored form
            must be the same for all layouts. With None, the state is stored unchanged. A pipeline
            needs `decoder.stored`, which joins the blocks of the pipeline's chunks.
        finite: a function that takes the path of an array, and returns whether the array must be
            finite. By default every array must be finite. Let the function return False, for
            example, for a mask of -inf, or for the lowest loss so far in an optimizer's state,
            which begins at inf.
        tries: how often a save is tried if the storage fails for a while (no space, no permission,
            an error of the disk or of the network). Between two tries there is a pause, first of
            one second and then each time twice as long; 8 tries take two minutes. The run goes on
            meanwhile. With 2 tries or more, each process keeps a copy of its shards of the arrays
            in the host's memory until the save is finished.
        say: a function that prints a line. The first process calls it. Any other process calls it
            only for its own error in a save.

    Raises:
        ValueError: a number in `keep`, or `tries`, is below 1, or `lose_at_most` is below 2; or a
            setting is no JSON value.
        OSError: the folder cannot be made.
        ImportError: Orbax is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        settings: Mapping[str, Any],
        lose_at_most: int = 100,
        keep: Retention = Retention(),  # noqa: B008
        form: DiskForm | None = None,
        finite: Callable[[str], bool] = lambda path: True,
        tries: int = 8,
        say: Callable[[str], Any] = print,
    ):
        """Checks the arguments, and makes the folder. `with` takes the lock on the folder."""
        if keep.newest < 1 or (keep.every is not None and keep.every < 1):
            raise ValueError(f"Checkpoints: the numbers in `keep` must be 1 or more; got {keep}.")
        if tries < 1:
            raise ValueError(f"Checkpoints: `tries` must be 1 or more; got {tries}.")
        if lose_at_most < 2:
            raise ValueError(
                f"Checkpoints: `lose_at_most` must be 2 steps or more; got {lose_at_most}. To "
                f"lose at most 1 step, call save() and then wait() after each step."
            )
        self.folder = Path(folder).absolute()
        self.settings = _as_read_back("settings", settings)
        self.lose_at_most, self.keep = lose_at_most, keep
        self.form, self.finite = form, finite
        self.refused: dict[int, ValueError] = {}  # why a step was refused, by step
        # From the state in memory to its stored form.
        self._to_disk = None if form is None else eqx.filter_jit(form.to_disk)
        self._say = say if jax.process_index() == 0 else lambda line: None
        # The key of each barrier (`_come`): this name, and the number of the meeting.
        self._name, self._meetings = f"parallax checkpoints {next(_made)}", itertools.count()
        # A function that waits at a barrier for all processes.
        self._meet = orbax().multihost.get_barrier_sync_fn()
        manifest.hasher()  # raises now if xxhash is not installed

        def make_room(step):
            """Moves a bad checkpoint of `step` aside. Each call reads `self.refused` again, because
            `restore` replaces this dict by a new one.
            """
            retention.make_room(self.folder, step, self.settings, self.refused)

        # The writer calls `sealed` after it has finished a checkpoint.
        self._writer = Writer(
            self.folder, self._name, make_room=make_room, sealed=self._sealed, tries=tries, say=say
        )
        self._lock: lock.Lock | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"{self.folder}: cannot make this folder for checkpoints: {error.strerror}. "
                "Choose another folder."
            ) from error

    def __enter__(self):
        """Takes the lock on the folder, on the first process."""
        if jax.process_index() == 0 and self._lock is None:
            self._lock = lock.take(self.folder, say=self._say)
        return self

    def __exit__(self, kind, error, traceback):
        """Waits for the last save, unless the block raised an error, and releases the lock."""
        try:
            if kind is None:  # no error: the last save must end well
                self.wait()
        finally:
            # After an error the writer may wait forever for other processes. Then the lock stays
            # until the process ends, so that no other run writes at the same time as this writer.
            if self._lock is not None and not self.saving():
                self._lock.release()
                self._lock = None

    # Saving

    def due(self, step: int) -> bool:
        """Returns whether a save should begin after `step`, so that a kill never loses more than
        `lose_at_most` steps.
        """
        # Half of `lose_at_most`, because a save may still run when the job is killed. The steps
        # since the previous save are then lost, too.
        return step % (self.lose_at_most // 2) == 0

    def save(
        self,
        step: SupportsIndex,
        state: PyTree,
        note: Mapping[str, Any] | None = None,
        *,
        evaluated: float | None = None,
    ) -> None:
        """Stores `state` as the checkpoint of `step`, in the background. The state may be donated
        as soon as the call returns.

        The call first waits for the previous save to end. An error in the background is raised by
        the next `save`, `check` or `wait`.

        Args:
            state: the state. Its arrays, random keys and plain numbers are stored; at least one
                array must not be empty. Other leaves, such as functions, are not stored; `restore`
                takes them from its argument `like`.
            note: JSON values that `restore` returns with the state, such as counts that the
                training loop keeps.
            evaluated: the loss of this state on held-out data, if it was measured. The newest
                checkpoint with a finite loss stays until there is a newer one with a finite loss.

        Raises:
            ValueError: an array or a plain number is not finite, or all arrays are empty; or `step`
                is no whole number from 0 on, or `note` has a value that is no JSON value; or the
                folder holds a finished checkpoint of this step or of a later one (checkpoints that
                `restore` refused do not count). If the `Checkpoints` were made with a `form` and
                `jax_enable_x64` is off, `save` converts NumPy arrays to 32 bits, and refuses
                numbers that do not fit.
            OSError: the storage failed, for example because the disk is full. The message names the
                folder and the newest good checkpoint.
        """
        (step,) = argument_checks.whole_numbers("Checkpoints.save", step=step)
        if not records.is_step(step):
            raise ValueError(
                f"Checkpoints.save needs a step from 0 to {records.STEPS - 1}; got {step}. Pass "
                "the number of training steps that led to this state."
            )
        self.wait()
        # The stored form is the same for all layouts: for example, a pipeline's chunks are joined.
        # `stored.stored` returns its arrays and its plain numbers, as two dicts by path.
        in_stored_form = (
            state
            if self._to_disk is None
            else self._to_disk(mesh.in_types_of_jax("Checkpoints.save with a `form`", state))
        )
        arrays, numbers = stored.stored(in_stored_form)
        # `_lost` starts the search for nan and inf, which runs on the devices while Orbax begins to
        # write. The returned function waits for the search. `_writer.write` below calls this
        # function, and raises `ValueError` before this call of `save` returns.
        not_finite = self._lost(arrays)
        # A copy of the note: the writer's thread reads it later, when the caller may have changed
        # it.
        noted = _as_read_back("note", note or {})
        described = {name: stored.described(leaf) for name, leaf in arrays.items()}
        loss = None if evaluated is None or not math.isfinite(evaluated) else float(evaluated)
        record = Record(step, self.settings, noted, numbers, described, loss)
        # As Orbax stores the arrays: random keys as integers.
        plain = {name: stored.plain(leaf) for name, leaf in arrays.items()}
        empty = stored.empty(plain)  # arrays of size zero, which Orbax does not store
        if len(empty) == len(plain):
            raise ValueError(
                f"Checkpoints.save needs a state with an array that is not empty; got {len(plain)} "
                "arrays, all of size 0. Pass the state of the run."
            )
        self._writer.write(
            record, {name: leaf for name, leaf in plain.items() if name not in empty}, not_finite
        )

    def saving(self) -> bool:
        """Returns whether a save is running in the background."""
        return self._writer.busy()

    def check(self) -> None:
        """Raises the error of a save in the background, if there was one. The call costs almost
        nothing, so make it at every step.
        """
        self._writer.check()

    def wait(self) -> None:
        """Waits until the last save is finished and its manifest is written. Raises the error of
        the save, as `check` does.
        """
        self._writer.wait()

    def _sealed(self, step: int) -> None:
        """Forgets that the checkpoint of `step` was refused, if it was, since a new checkpoint has
        replaced it. Stores that it is the newest. Then removes old checkpoints. The background
        thread that writes checkpoints calls this method after it has finished the checkpoint of
        `step`.
        """
        self.refused.pop(step, None)
        retention.write_newest(self.folder, step, self.refused)
        retention.prune(self.folder, self.settings, self.refused, self.keep)

    def _lost(self, arrays: dict[str, Any]) -> Callable[[], list[str]]:
        """Starts the search for nan and inf in the arrays that must be finite. Returns a function
        that waits for the search, and returns the names of the arrays with a nan or an inf.
        """
        return stored.not_finite({name: leaf for name, leaf in arrays.items() if self.finite(name)})

    # Restoring

    def steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, oldest first. A checkpoint is finished if
        it has a manifest; the manifest is not read here.
        """
        return retention.finished(self.folder)

    def restore(self, like: PyTree, *, before: int | None = None) -> Restored | None:
        """Returns the newest good checkpoint of this run, or `None` if the folder never held a
        finished one.

        Before any array is read, all files are checked against the manifest. Each process hashes a
        share of the files with XXH3, at up to about 20 GB/s per core. No device waits in a
        collective during the check.

        Args:
            like: a state of arrays or `jax.ShapeDtypeStruct`s, with the tree, shapes, dtypes and
                shardings of the state to return.
            before: a step. The checkpoints of this step and of later ones are passed over, if there
                is a checkpoint of an earlier step. When the run continues from the earlier
                checkpoint, the run's saves remove the later ones. The numbers of these later steps
                are stored in the folder: by this call inside `with Checkpoints(...)`, and without
                `with` by the next save. A `restore` without `before`, also in a new process, passes
                over the stored steps. A `restore` with another `before` replaces them.

        Raises:
            Refused: there were checkpoints, and none is good; the message gives the reason for
                each. So a run does not start from the beginning unnoticed. Only the first process
                raises this error. The other processes wait for the first one at a barrier, until
                `processes.run` ends them.
            ValueError: the checkpoint is good, but its arrays are not those of `like`; the message
                names the leaf.
        """
        self.wait()
        self.refused = {}  # a file that could not be read before may be readable now
        goes_back = jax.process_index() == 0 and self._pass_over(before)
        # The first process proposes a step (`NONE`: there is no checkpoint), and all check its
        # files. If they are bad, the step is refused on all processes, and the next older one is
        # proposed.
        while True:
            step = self._of_first(self._newest_good() if jax.process_index() == 0 else NONE)
            if step == NONE:
                return None
            # `files`: the size and the hash of each file, by name.
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
            if goes_back and self._lock is not None:  # a reader without the lock decides nothing
                self._store_decision(step)
            return Restored(step, state, record.note, self._refused_by_first())

    def _pass_over(self, before: int | None) -> bool:
        """Refuses the checkpoints of step `before` and of later steps, and returns True, if there
        is a finished checkpoint of an earlier step. If there is none, or `before` is None, refuses
        the checkpoints that the run gave up in a previous `restore`, and returns False.
        """
        steps, given_up, _ = retention.seen(self.folder)
        if before is not None and any(step < before for step in self.steps()):
            asked = f"a checkpoint from before step {before} was asked for"
            self.refused |= {
                step: retention.GivenUp(f"{self._path(step)}: {asked}.")
                for step in steps
                if step >= before
            }
            return True
        for step in sorted({*given_up} & {*steps}):
            why = (
                f"{self._path(step)}: the run went back to an earlier checkpoint. To use this one "
                f"all the same, restore with before={step + 1}."
            )
            self._refuse(step, retention.GivenUp(why))
        return False

    def _store_decision(self, step: int) -> None:
        """Stores that the run goes on from `step`, and which later checkpoints it has given up."""
        try:
            retention.write_newest(self.folder, step, self.refused)
        except OSError as error:  # such as a full disk, which the run survives
            unwritten = error.filename or self.folder / NEWEST
            self._say(f"{unwritten}: cannot be written; {error.strerror}. The next save tries it.")

    def _refused_by_first(self) -> dict[int, str]:
        """Returns, on all processes, the reason for each step that the first process refused. The
        other processes lack some reasons, since only the first compares names and sizes of files.
        """
        refused = {step: str(why) for step, why in self.refused.items()}
        if jax.process_count() == 1:
            return refused
        text = json.dumps(list(refused.items())).encode()
        size = self._of_first(len(text))
        sent = multihost_utils.broadcast_one_to_all(
            np.frombuffer(text[:size].ljust(size), np.uint8)
        )
        return dict(json.loads(np.asarray(sent).tobytes()))

    def _of_first(self, number: int) -> int:
        """Sends the `number` of the first process to all processes, and returns it."""
        # The first process may look at files for a long time. The others wait for it at this
        # barrier: a collective would hold their devices, and may have a deadline.
        self._come()
        return (
            int(multihost_utils.broadcast_one_to_all(np.asarray(number, np.int32)))
            if jax.process_count() > 1
            else number
        )

    def _come(self) -> None:
        """Waits at a barrier, for up to a day, until all processes have come here. A collective
        after the barrier is then short, and does not run into a timeout.
        """
        self._meet(
            key=f"{self._name}, meeting {next(self._meetings)}", timeout_ms=round(LONG * 1000)
        )

    def _wrong(self, step: int, files: dict[str, list]) -> ValueError | None:
        """Returns an error for the first fault in the files of a checkpoint, or None if they are
        good. Each process hashes its share of the files, and all get the same result. `files` has
        the size and the hash of each file, by name.
        """
        # Sorted by size, so that the shares have about equally many bytes. `fault` is a text, so
        # that it can be sent: the kind of error and its message, or "".
        by_size, fault = sorted(files, key=lambda name: (-files[name][0], name)), ""
        try:
            share = by_size[jax.process_index() :: jax.process_count()]
            manifest.check_hashes(self._path(step), {name: files[name] for name in share})
        except manifest.Damaged as error:
            fault = f"damaged: {error}"
        except OSError as error:  # not damage: the files may be good, and are never removed
            fault = f"unread: {_unreadable(error, self._path(step))}"
        if jax.process_count() > 1:
            self._come()  # a barrier, since some processes hash longer than others
            # Each process sends a text of `TOLD` bytes; the first that is not blank counts.
            faults = multihost_utils.process_allgather(
                np.frombuffer(fault.encode()[:TOLD].ljust(TOLD), np.uint8)
            )
            fault = next(
                filter(None, (bytes(text).decode(errors="replace").rstrip() for text in faults)), ""
            )
        kind, _, words = fault.partition(": ")
        return {"": None, "damaged": manifest.Damaged(words), "unread": ValueError(words)}[kind]

    def _refuse(self, step: int, why: ValueError) -> None:
        """Notes that the checkpoint of `step` is refused, and prints the reason."""
        self.refused[step] = why
        self._say(f"refused the checkpoint of step {step}: {why}")

    def _newest_good(self) -> int:
        """Returns the newest step that is not refused and whose files have the right names and
        sizes. Refuses the checkpoints that are newer than this step and not good. Returns `NONE` if
        the folder never held a finished checkpoint. Raises `Refused` if the folder held finished
        checkpoints, and none is good.
        """
        # Each step that has a folder, finished or not, or is the newest in `newest.json`; and why
        # that file cannot be read, or "".
        steps, _, damage = retention.seen(self.folder)
        reasons = f"\n  {damage}" if damage else ""
        if damage:
            self._say(damage)
        for step in reversed(steps):
            if step not in self.refused:
                try:
                    records.verify(self._path(step), step, self.settings)
                except RecursionError:
                    nested = (
                        f"{self._path(step) / MANIFEST}: needed a manifest, got one "
                        f"nested too deep to compare."
                    )
                    self._refuse(step, manifest.Damaged(nested))
                except OSError as error:
                    self._refuse(step, ValueError(_unreadable(error, self._path(step))))
                except ValueError as error:
                    self._refuse(step, error)
                else:
                    return step
            reasons += f"\n  step {step}: {self.refused[step]}"
        # `self.steps()` are the finished checkpoints only, those with a manifest.
        if not os.path.lexists(self.folder / NEWEST) and not self.steps():
            return NONE
        raise Refused(
            f"{self.folder} held finished checkpoints, and none of them may be restored:{reasons}\n"
            "Correct one of these faults, or choose another folder to begin again."
        )

    def _read(self, step: int, record: Record, like: PyTree) -> PyTree:
        """Returns the state of a checkpoint, with the tree and the shardings of `like`. `record`
        has the manifest's description of the stored arrays and numbers.

        Raises:
            ValueError: the manifest lists other arrays than `like` has.
            manifest.Damaged: an array that must be finite has nan or inf.
        """
        like = stored.shapes(like)  # shapes with the shardings of `like`
        # `like` in the stored form, as shapes. `form` has two functions: from the state in memory
        # to the state on disk (`to_disk`), and back (`from_disk`).
        wanted = like if self.form is None else stored.converted(self.form.to_disk, like)
        arrays, numbers = stored.stored(wanted)
        stored.check_same(
            self._path(step),
            record,
            {name: stored.described(leaf) for name, leaf in arrays.items()},
            numbers,
        )
        if others := records.differences(record.numbers, numbers):
            self._say(
                f"the plain numbers of step {step} differ from this program's, and the stored ones "
                f"are used: {others}. A constant of the program should be a static field, which is "
                "not stored."
            )
        # The shapes as Orbax stores the arrays: random keys are integers.
        template = {name: stored.plain(leaf) for name, leaf in arrays.items()}
        empty = stored.empty(template)  # arrays of size zero, which Orbax does not store
        template = {name: leaf for name, leaf in template.items() if name not in empty}
        shardings = orbax().checkpoint_utils.construct_restore_args(template)
        found = empty | self._writer.arrays.restore(
            self._path(step) / ARRAYS, args=orbax().args.PyTreeRestore(template, shardings)
        )
        # The search for nan and inf communicates, and could run into a timeout if some processes
        # read much longer than others. So all meet at a barrier first (`_come`). `_lost` starts the
        # search, and returns a function that waits for the names.
        self._come()
        if lost := self._lost(found)():
            raise manifest.Damaged(
                f"{self._path(step)}: needed a finite state; nan or inf is in "
                f"{retention.listed(lost)}."
            )
        state = stored.found(wanted, found, record.numbers)
        if self.form is not None:
            state = stored.placed(self.form.from_disk, state, like)
        return stored.as_weak(state, like)

    def _path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of `step`."""
        return retention.path_of(self.folder, step)


def _as_read_back(what: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of JSON values, as they are read back from a record: for example, tuples
    become lists. Numbers may be nan or infinite, which Python's json reads and writes too. Raises
    `ValueError` if one of the `values` is no JSON value. `what` is the name of `values` in the
    message: "settings" or "note"."""
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Checkpoints: `{what}` needs JSON values (numbers, texts, lists and dicts); "
                f"{name!r} is of type {type(value).__name__} ({error}). Convert an array by "
                ".tolist()."
            ) from error
    return json.loads(json.dumps(dict(values)))


def _unreadable(error: OSError, path: Path) -> str:
    """Returns a sentence that says which file cannot be read: the file of `error`, or `path`."""
    return f"{error.filename or path}: it cannot be read; {error.strerror}."
