"""Writes checkpoints while the run takes further steps. Orbax writes the arrays. Then the
checkpoint is *sealed*: all files are hashed, and the manifest is written. After each save, the
caller's function `sealed` stores the step as the newest one and removes old checkpoints.

If the storage fails for a while, the save is tried again, after longer and longer pauses. All
processes go through the same `Stages`, and agree on how each stage ended. `Stages.first(work)` is a
stage in which only the first process works. `Stages.failed(error)` returns whether to try again,
with the same answer on all processes.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from parallax.run import record as records
from parallax.run import retention, stored
from parallax.run.barriers import Elsewhere, Stages
from parallax.run.record import ARRAYS, Record

PAUSE = 1.0  # seconds until a save is tried again for the first time; each time twice as long
PART = 128 * 1024**2  # approximate bytes of a file of arrays: several files use several cores


class Writer:
    """Writes one checkpoint at a time into `folder`. Every process makes the same calls.

    Args:
        folder: the folder of the checkpoints.
        name: a name that no other writer of the job has, and that is the same on all processes.
        make_room: called on the first process, with the number of a step, before the checkpoint of
            this step is written; it moves aside a checkpoint of the same step that is unfinished or
            cannot be restored.
        sealed: called on the first process, in the writer's thread, with the number of a step whose
            checkpoint is finished; it stores that this is the newest step, and removes old
            checkpoints.
        tries: the number of times that a save is tried.
        say: prints a line about an error of this process.

    Attributes:
        arrays: Orbax's checkpointer, which writes and reads arrays.

    Raises:
        ImportError: Orbax is not installed.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        make_room: Callable[[int], object],
        sealed: Callable[[int], object],
        tries: int,
        say: Callable[[str], Any],
    ):
        """Makes Orbax's checkpointer; nothing is written yet."""
        self._folder, self._name, self._tries, self._say = folder, name, tries, say
        self._make_room, self._sealed = make_room, sealed
        # A barrier of all processes, and the numbers of the saves, which the barriers' keys have.
        self._meet, self._saves = orbax().multihost.get_barrier_sync_fn(), itertools.count()
        self._stages = Stages(name, self._meet)
        self.arrays = self._checkpointer()
        self._thread: threading.Thread | None = None  # that finishes the last save
        self._error: BaseException | None = None  # of that thread, until `check` raises it

    def write(self, record: Record, arrays: dict[str, Any], lost: Callable[[], list[str]]) -> None:
        """Begins to write a checkpoint. The arrays may be donated as soon as the call returns. No
        other checkpoint may be in progress.

        `lost` waits for the search for nan and inf, and returns the names of the arrays that have a
        nan or an inf. `write` calls `lost` after Orbax has begun to write, so that the search and
        the writing run at the same time. If `lost` returns names, `write` removes the files that
        Orbax has begun to write.

        Raises:
            ValueError: an array is not finite.
            retention.Later: `make_room` found a finished checkpoint of this step or of a later one
                in the folder.
            OSError: the storage failed, and will not recover by itself.
        """
        # A second try needs copies, since the arrays may be donated by then.
        copies = stored.held(arrays) if self._tries > 1 else lambda: arrays
        name, error = f"{self._name}, save {next(self._saves)}", None
        self._stages = Stages(name, self._meet)
        try:
            self._begin(record, arrays)
        except retention.Later:  # a mistake of the caller, which a second try would not mend
            raise
        except Exception as failure:
            if not self._stages.failed(failure):
                raise self._failed(record.step, failure) from failure
            error = failure  # `_finish` tries again, in the background
        if names := lost():
            self._drop(record.step)
            raise ValueError(
                f"The state of step {record.step} was not saved, because these arrays are not "
                f"finite: {retention.listed(names)}. "
                f"{retention.newest_in_words(self._folder)}"
            )
        arguments = name, record, copies, error
        self._thread = threading.Thread(
            target=self._finish, args=arguments, name=f"checkpoint {record.step}", daemon=True
        )
        self._thread.start()

    def busy(self) -> bool:
        """Returns whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raises the error of the background thread, if there was one, and forgets it."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Waits until the checkpoint is finished. Raises the error of the background thread, as
        `check` does.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _begin(self, record: Record, arrays: dict[str, Any]) -> None:
        """Makes the folder, and passes the arrays to Orbax's checkpointer, `self.arrays`, whose
        `save` copies them and then writes in the background.
        """

        def make():
            """Moves away a checkpoint of this step that is unfinished or cannot be restored, and
            makes the new folder. Only the first process calls `make`.
            """
            self._make_room(record.step)
            records.begin(self._path(record.step), record)

        self._stages.first(make)
        self.arrays.save(
            self._path(record.step) / ARRAYS,
            args=orbax().args.PyTreeSave(arrays, ocdbt_target_data_file_size=PART),
        )

    def _begin_again(self, record: Record, arrays: dict[str, Any]) -> None:
        """Removes the files that the last attempt left, which may fill the disk, and calls `_begin`
        again.
        """
        self._remove(record.step)
        self._begin(record, arrays)

    def _drop(self, step: int) -> None:
        """Waits for the save that `_begin` began, and removes its files."""
        with contextlib.suppress(Exception):
            self.arrays.wait_until_finished()
        self._remove(step)

    def _remove(self, step: int) -> None:
        """Removes the files of a checkpoint, and makes a new Orbax checkpointer: after a failure
        the old one cannot write again.
        """
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                retention.remove(self._path(step))
        self.arrays = self._checkpointer()

    def _finish(
        self,
        name: str,
        record: Record,
        copies: Callable[[], dict[str, Any]],
        first_failure: Exception | None,
    ) -> None:
        """Finishes a save, in the writer's thread: waits for Orbax, and seals the checkpoint.

        If the storage fails, the method tries again after a pause, up to `tries` times in all. It
        does not write the arrays again if an earlier try has written them. The last error is kept
        for `check`.

        Args:
            name: the name of this save, with which the keys of its barriers begin.
            record: the contents of the manifest.
            copies: a function that makes the arrays again from copies, since the caller may have
                donated the arrays.
            first_failure: the error of `_begin`, in the caller's thread, or None.
        """
        written = False
        for number in itertools.count(1):
            try:
                if number == 1 and first_failure is not None:
                    raise first_failure  # the first try has failed: go on as after any failure
                if number > 1:
                    # New barriers: some processes may not have come to the last try's.
                    self._stages = Stages(f"{name}, try {number}", self._meet)
                    if not written:
                        self._begin_again(record, copies())
                if not written:
                    self.arrays.wait_until_finished()
                    # `written` is equal on all processes: at the end of its save, Orbax waits for
                    # all processes by `meet` (in `_checkpointer`), which raises on all or on none.
                    written = True
                self._stages.first(lambda: self._seal(record))
                return
            # Any error: the thread has no caller, so `check` must raise it in the run.
            except BaseException as failure:
                error = self._failed(record.step, failure)
                pause = PAUSE * 2 ** (number - 1)
                all_try_again = self._stages.failed(failure)  # all processes get one answer
                if not all_try_again or number == self._tries:
                    self._error = error
                    return
                if not isinstance(failure, Elsewhere):  # `Elsewhere`: another process prints it
                    self._say(
                        f"{error} The next of {self._tries} tries is in {pause:g} s; the run "
                        f"goes on meanwhile."
                    )
            time.sleep(pause)

    def _seal(self, record: Record) -> None:
        """Writes the manifest of a checkpoint, and calls `sealed`, a function of the caller that
        stores its step as the newest one, and removes old checkpoints. Only the first process runs
        this method, by `Stages.first`, while the other processes wait.
        """
        records.seal(self._path(record.step), record)
        self._sealed(record.step)

    def _checkpointer(self) -> Any:
        """Returns a new asynchronous checkpointer of Orbax, which uses the barriers of this writer.
        A new one is needed after each failure, since the old one cannot write any more.
        """
        checkpoint = orbax()
        # Weights hardly compress, and compression takes more CPU time than the rest of a save.
        handler = checkpoint.PyTreeCheckpointHandler(use_compression=False)
        # If the processes are named, Orbax also uses barriers of the coordination service, not
        # collectives, so it can work in the background.
        processes = set(range(jax.process_count()))
        together = checkpoint.options.MultiprocessingOptions(
            active_processes=processes, barrier_sync_key_prefix=self._name
        )

        def meet(key: str, timeout_ms: int) -> None:
            """Waits for all processes, by `Stages.end`. Orbax calls `meet` in place of its own
            barrier. If a process has failed, `Stages.end` raises an error on every process. `key`
            and `timeout_ms` are not used: `Stages` has keys and time limits of its own.
            """
            self._stages.end()

        # Folders are made before `save` returns. In the background, Orbax would wait 5 minutes for
        # a folder that it cannot make.
        options = checkpoint.options.AsyncOptions(
            barrier_sync_fn=meet, create_directories_asynchronously=False
        )
        return checkpoint.AsyncCheckpointer(
            handler, async_options=options, multiprocessing_options=together
        )

    def _failed(self, step: int, error: BaseException) -> OSError:
        """Returns an error that names the checkpoint that was not saved, and the newest finished
        checkpoint. The cause of the returned error is `error`.
        """
        words = f"The checkpoint of step {step} in {self._path(step)} was not saved: {error}"
        failure = OSError(f"{words} {retention.newest_in_words(self._folder)}")
        failure.__cause__ = error  # `processes.run` looks for an error of another process there
        return failure

    def _path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of `step`."""
        return retention.path_of(self._folder, step)


def orbax() -> Any:
    """Returns `orbax.checkpoint`.

    Raises `ImportError`, which says what to install, if Orbax is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            'Checkpoints are written by Orbax: pip install -e ".[checkpoint]".'
        ) from error
    return orbax.checkpoint
