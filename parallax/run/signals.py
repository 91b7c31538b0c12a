"""Handles signals that end a run, also while the main thread is inside a compiled program.

Python calls a signal's handler in the main thread, between two Python instructions. So Python calls
no handler while the main thread compiles or waits for devices. But the C part of Python's handler
writes the signal's number to a pipe at once (`signal.set_wakeup_fd`), and a thread here reads the
pipe. JAX is not imported here.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

TO_END = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
END = b"\0"  # a byte in the pipe that ends the thread; no signal has the number 0
Hear = Callable[[signal.Signals, int], None]


@contextlib.contextmanager
def listening(hear: Hear, *numbers: signal.Signals) -> Iterator[None]:
    """Calls `hear(signal, count)` for each signal of `numbers` that comes during the `with` block.
    One thread makes all calls, one after another, and `count` is the number of the call, from 1 on.

    A signal that was ignored before, as by nohup, stays ignored. Only the main thread can listen;
    in another thread this function does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    # Python's handler must not wait, even if the pipe is full.
    os.set_blocking(write_end, False)
    # `getsignal` returns None for a handler of a C library, which Python could not restore.
    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    # The handlers do nothing, but without a handler in Python no byte is written to the pipe.
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def listen() -> None:
        """Reads signals' numbers from the pipe, one byte each, until `END`. Calls `hear` for each
        signal that is in `heard`; the pipe also gets signals that other handlers catch.
        """
        count = 0
        while (byte := os.read(read_end, 1)) != END:
            if byte[0] in heard:
                count += 1
                hear(signal.Signals(byte[0]), count)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(write_end, END)
        thread.join()
        os.close(write_end)
        os.close(read_end)


def say(line: str) -> None:
    """Writes a line to stderr by one system call, from any thread. If the terminal is gone, the
    line is lost without an error.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def leave_terminal() -> None:
    """Discards all further output to the terminal. After SIGHUP the terminal is gone, and `print`
    would raise an error in the middle of a save.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stream.isatty():  # pyright: ignore[reportOptionalMemberAccess]
                os.dup2(nowhere, stream.fileno())  # pyright: ignore[reportOptionalMemberAccess]
    os.close(nowhere)
