"""Signals that say `end`, heard while the main thread is inside a compiled program too.

Python calls a signal's handler between two of its own instructions, so a program that compiles or
waits for its devices hears nothing. The C part of the handler writes to a pipe at once, and a
thread reads it. JAX is not imported here.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

TO_END = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
END = b"\0"  # no signal has this number
Hear = Callable[[signal.Signals, int], None]


@contextlib.contextmanager
def listening(hear: Hear, *numbers: signal.Signals) -> Iterator[None]:
    """Inside, each of these signals calls `hear(signal, count)`, with how many of them have come by
    then, in a thread.

    A signal that was ignored, as by nohup, stays so. Only the main thread can listen; in others
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    wake = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)

    def listen() -> None:
        count = 0
        while (numbers_read := os.read(reads, 1)) != END:
            if numbers_read[0] in heard:
                count += 1
                hear(signal.Signals(numbers_read[0]), count)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wake)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(writes, END)
        thread.join()
        os.close(writes)
        os.close(reads)


def say(line: str) -> None:
    """Writes a line to stderr, with one call, from any thread; a terminal that is gone is no
    error."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def leave_terminal() -> None:
    """After SIGHUP the terminal is gone: what is printed from now on goes nowhere, instead of
    ending the save by an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stream.isatty():  # pyright: ignore[reportOptionalMemberAccess]
                os.dup2(nowhere, stream.fileno())  # pyright: ignore[reportOptionalMemberAccess]
    os.close(nowhere)
