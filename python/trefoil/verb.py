"""How a verb of the command runs in Python: `python -m trefoil.verb MODULE ARGUMENTS`.

Whatever ends it early is one sentence on stderr and no traceback: SIGINT is exit code 130, SIGTERM
143, a disk that is full or a limit on file sizes 1. A reader that closes the pipe ends it silently,
with 141. Processes that it started are ended with it.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

_at_end: list[Callable[[], None]] = []


class Interrupted(BaseException):
    """A signal ends the verb; unfinished files are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def show_progress(text: str = "") -> None:
    """On a terminal, in the place of what was shown before; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def when_interrupted(action: Callable[[], None]) -> None:
    """Also done when a signal ends the verb, first of all."""
    _at_end.append(action)


def _ignore_signals() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    _ignore_signals()  # once is enough
    for action in _at_end:
        action()
    raise Interrupted(number)


def _catch_signals() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def _leave(code: int) -> NoReturn:
    """Ends at once: threads that still wait for a process of theirs are not waited for."""
    sys.stderr.flush()
    os._exit(code)


def _interrupted(name: str, number: int) -> NoReturn:
    what = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    start = "\n" if sys.stderr.isatty() else ""
    print(f"{start}trefoil {name}: {what}", file=sys.stderr)
    _leave(128 + number)


def _unwritten(name: str, error: OSError) -> NoReturn:
    if isinstance(error, BrokenPipeError):
        _leave(141)
    why = error.strerror or str(error)
    print(f"trefoil {name}: the output could not be written: {why}", file=sys.stderr)
    _leave(1)


def run(name: str, main: Callable[[], int]) -> int:
    """The exit code of main, after what it printed has been taken."""
    try:
        _catch_signals()
        try:
            code = main()
        except SystemExit as end:  # of the parser: --help or a wrong command line
            code = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        _ignore_signals()  # all is done
        return code
    except Interrupted as signalled:
        _interrupted(name, signalled.number)
    except KeyboardInterrupt:
        _interrupted(name, signal.SIGINT)
    except MemoryError:
        print(f"trefoil {name}: out of memory", file=sys.stderr)
        _leave(1)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO):
            _unwritten(name, error)
        raise


def _main() -> int:
    module = sys.argv[1]
    names = {"capacity": "plan", "validation": "validate", "bench_plot": "bench"}
    short = module.rpartition(".")[2]
    sys.argv[0:2] = [module]

    def load_and_run() -> int:
        found = importlib.import_module(module)
        if hasattr(found, "__path__"):
            found = importlib.import_module(f"{module}.__main__")
        code: int = found.main()
        return code

    return run(names.get(short, short), load_and_run)


if __name__ == "__main__":
    sys.exit(_main())
