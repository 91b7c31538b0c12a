"""Places batches on the devices. Each process reads its own rows of a batch, in the background,
before the batch is needed.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, SupportsIndex, TypeVar

import jax
from jax.sharding import Sharding
from jaxtyping import Array, Int32

from parallax import argument_checks
from parallax.data.batches import batch
from parallax.data.tokens import Source

Batch = TypeVar("Batch")


def placed(
    tokens: Source,
    sharding: Sharding,
    *,
    seed: SupportsIndex,
    step: SupportsIndex,
    size: SupportsIndex,
    length: SupportsIndex,
) -> Int32[Array, "size length_and_one"]:
    """Returns a batch, the one that `data.batch` makes, as one array over the devices of all
    processes. Each process reads only the rows of its own devices.

    Args:
        tokens: the text, as `data.batch` takes it. Every process passes the same text.
        sharding: the sharding of the batch, such as `NamedSharding(mesh, P("data"))`, which splits
            the rows. Rows that several devices of a process hold are read once.
        seed: the seed of the run, with which `data.batch` draws the order of the windows.
        step: the number of the step whose batch is wanted.
        size: the number of rows in the global batch, in all processes together.
        length: the number of inputs in a row. A row has one token more.

    Raises:
        ValueError: `data.batch` refuses the arguments, for example a text that is too short.
    """
    size, length = argument_checks.whole_numbers("data.placed", size=size, length=length)
    read = {}  # the rows that were read, by (start, stop, step)

    def rows(index):
        """Returns the rows of one device. `index` says which part of the batch the device holds, by
        a slice for each dim. Devices with the same slice of rows share one read.
        """
        bounds = index[0].indices(size)
        if bounds not in read:
            read[bounds] = batch(
                tokens, seed=seed, step=step, size=size, length=length, rows=slice(*bounds)
            )
        return read[bounds]

    return jax.make_array_from_callback((size, length + 1), sharding, rows)


class Prefetched(Generic[Batch]):
    """An iterator over the batches `make(start)`, ..., `make(stop - 1)`. A thread makes up to
    `ahead` batches in advance.

        make = lambda step: placed(tokens, sharding, step=step, ...)
        with Prefetched(make, start, stop) as batches:
            for batch in batches:
                ...

    If `make` raises an error at a step, the `next` that asks for the batch of this step raises the
    same error. If `make` raises `StopIteration`, `next` raises `ValueError` instead. At most
    `ahead` + 1 batches are in memory. At the end of the `with` block the thread ends, after the
    batch that it is making; `next` then raises `ValueError`.

    Args:
        make: a function that returns the batch of a step.
        start: the first step.
        stop: the step after the last.
        ahead: the largest number of batches that are made before they are asked for.

    Raises:
        ValueError: `ahead` is below 1, or `start`, `stop` or `ahead` is no whole number.
    """

    def __init__(
        self,
        make: Callable[[int], Batch],
        start: SupportsIndex,
        stop: SupportsIndex,
        *,
        ahead: SupportsIndex = 2,
    ):
        """Checks `start`, `stop` and `ahead`, and starts the thread that makes the batches."""
        start, stop, ahead = argument_checks.whole_numbers(
            "Prefetched", start=start, stop=stop, ahead=ahead
        )
        if ahead < 1:
            raise ValueError(f"Prefetched needs ahead >= 1; got {ahead}.")
        self._made: queue.Queue = queue.Queue(ahead)  # of pairs (batch, error)
        self._left = threading.Event()  # set at the end of the `with` block
        self._thread = threading.Thread(
            target=self._run, args=(make, start, stop), name="prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, make, start, stop):
        """Makes the batches `make(start)`, ..., `make(stop - 1)`, in the thread, and puts each into
        the queue as a pair (batch, error). The last pair has an error: `StopIteration` after the
        last batch, or the error that `make` raised. A `StopIteration` that `make` raised is
        replaced by a `ValueError`. Returns early if the block of `with Prefetched(...)` ends.
        """
        for step in range(start, stop):
            try:
                pair = (make(step), None)
            except StopIteration as ended:  # raised in a loop, it would end the loop early
                error = ValueError(
                    f"Prefetched needs a batch for every step from {start} to {stop - 1}; "
                    f"make({step}) raised StopIteration, since its data had ended. Pass a smaller "
                    "stop, or more data."
                )
                error.__cause__ = ended
                pair = (None, error)
            # Any error: `__next__` raises it in the caller's thread.
            except BaseException as error:
                pair = (None, error)
            # `_put` returns False if the `with` block has ended; an error ends the batches too.
            if not self._put(pair) or pair[1] is not None:
                return
        self._put((None, StopIteration()))

    def _put(self, pair) -> bool:
        """Puts a pair (batch, error) into the queue as soon as the queue has room, and returns
        True. Returns False if the block of `with Prefetched(...)` ended before that.
        """
        while not self._left.is_set():
            try:
                self._made.put(pair, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Returns the next batch. Raises the error of `make`, or `StopIteration` after the last."""
        if self._left.is_set():
            raise ValueError(
                "Prefetched makes no batches after its `with` block. Take them inside the block."
            )
        next_batch, error = self._made.get()
        if error is not None:
            self._made.put((None, error))  # the next call raises it again
            raise error
        return next_batch

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        """Tells the thread to end. Waits for the thread, unless the body of the `with` raised an
        error."""
        self._left.set()
        if kind is None:  # after an error in the block, the thread may hang in `make`
            self._thread.join()
