"""How every command ends: with an exit code, and one line instead of a traceback."""

import argparse
import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

CANNOT_RUN = 3
BAD_USAGE = 64  # EX_USAGE of sysexits.h; argparse would take 2
BROKEN_PIPE = 128 + 13  # SIGPIPE, which not every system has
_ENDING = threading.Event()
# While users' code runs, `os._exit` is another function.
_EXIT_AT_ONCE = os._exit
_ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

# Modules that commands import where they use them.
_OPTIONAL = ("attnax", "jinja2", "matplotlib", "plotly", "tokenizers", "torch", "transformers")


class UsageError(Exception):
    """The command cannot run as it was called; the message says how it can."""


@contextmanager
def usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds as a `UsageError` with their message."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from None


class Parser(argparse.ArgumentParser):
    """A parser that ends with `BAD_USAGE`."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end."""
        self.print_usage(sys.stderr)
        self.exit(BAD_USAGE, f"{self.prog}: error: {message}\n")


def guarded(run: Callable[[], int]) -> int:
    """Return the exit code of a command, with a line on stderr where it stops before its end.

    Args:
        run: function of the command; it returns 0, or 1 if a check failed.
    """
    _open_streams()
    try:
        return _ended(run)
    # A fault of this package. Python would end with 1, which says that two modules differ.
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
        return CANNOT_RUN


def _ended(run: Callable[[], int]) -> int:
    """Return the exit code of a command that ends as commands may."""
    try:
        return _flushed(run)
    except BrokenPipeError:  # nobody reads on, as behind `| head -1`
        _drop_stdout()
        return BROKEN_PIPE
    except UsageError as error:
        _say(str(error))
        return BAD_USAGE
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL:
            raise
        _say(f"this needs {error.name}, which is not installed: pip install {error.name}")
    except OSError as error:
        # Libraries raise their own errors of this kind, which are faults to be seen in full.
        if error.errno is None:  # none of the system's, which are no space, no permission
            raise
        _drop_stdout()
        _say(f"cannot go on: {error}")
    return CANNOT_RUN


def end_on_signals() -> None:
    """Let SIGINT and SIGTERM end this process in one line, with 128 and the number of the signal.

    Python would raise `KeyboardInterrupt` wherever it is. In the middle of an import, of a callback
    of a compiled program or of the garbage collector that is lost, or ends in a traceback or a
    crash, and a long compilation puts it off. So a thread waits for the signal, tidies up and ends
    the process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in _ENDS:
        # `nohup` and background jobs of a shell ask to ignore it.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
    # The handler does nothing but let Python write the number to this pipe, from any thread.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end, args=(reader,), daemon=True).start()


def end_after_exit_functions() -> Callable[[int], int]:
    """Let this process end right after the functions of `atexit`, those that libraries add as well.

    Python would take JAX and PyTorch apart object by object, which takes more than a second.

    Returns:
        Function that takes the exit code of the process, and returns it.
    """
    codes: list[int] = []

    def end() -> None:
        # Without a code the command has raised, and Python knows the code.
        if codes:
            with suppress(OSError):
                sys.stderr.flush()
            _EXIT_AT_ONCE(codes[0])

    # The functions run in reverse order, so the first that is registered runs last.
    atexit.register(end)

    def ends_with(code: int) -> int:
        codes.append(code)
        return code

    return ends_with


def _end(reader: int) -> NoReturn:
    # Other signals that the program handles are written there as well.
    number = 0
    while number not in _ENDS:
        number = os.read(reader, 1)[0]
    _ENDING.set()
    try:
        _tidy_up()
        with suppress(OSError):
            cursor = "\x1b[?25h\n" if os.isatty(2) else ""  # a progress bar hides it
            os.write(2, f"{cursor}flax-attn: {_ENDS[signal.Signals(number)]}\n".encode())
    finally:
        # Not `sys.exit`: that would end this thread alone.
        _EXIT_AT_ONCE(128 + number)


def _tidy_up() -> None:
    """End the processes that this one has started, and remove what is unfinished."""
    if "multiprocessing.util" in sys.modules:  # else semaphores are left, and a warning of them
        sys.modules["multiprocessing.util"]._run_finalizers(0)
    for child in _children():
        with suppress(OSError):  # it has ended by itself
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if "flax_attn.convert.replacing" in sys.modules:
        sys.modules["flax_attn.convert.replacing"].abandon()


def _children() -> list[int]:
    """Return the child processes of this one; without /proc, only its workers."""
    tasks = Path("/proc/self/task")
    if tasks.is_dir():
        return _children_of(tasks)
    if "multiprocessing" in sys.modules:
        workers = sys.modules["multiprocessing"].active_children()
        return [worker.pid for worker in workers]
    return []


def _children_of(tasks: Path) -> list[int]:
    # Each thread lists the processes that it has started.
    found = []
    for path in tasks.glob("*/children"):
        with suppress(OSError):  # of a thread that has ended
            found += map(int, path.read_text().split())
    return found


def _flushed(run: Callable[[], int]) -> int:
    try:
        return run()
    finally:
        if _ENDING.is_set():  # what fails now does so because its processes have been ended
            threading.Event().wait()
        sys.stdout.flush()  # a full disk shows here; at the end of Python it would be a traceback


def _say(text: str) -> None:
    with suppress(OSError):  # stderr may be closed or full as well
        print(f"flax-attn: {text}", file=sys.stderr, flush=True)


def _open_streams() -> None:
    """Let all text be printed: discarded if a stream is closed, escaped if it cannot be encoded."""
    # Closed, they are None in Python, and the first print would fail.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it stays open
        stream: Any = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Discard what is left in the buffer of stdout, which Python would fail to write at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
