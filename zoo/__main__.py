"""Entry point of `zoo` and `python -m zoo`, with clean termination by signals, also during imports."""

import contextlib
import gc
import os
import signal
import sys
import threading
from typing import Any, NoReturn

RESEND_SECONDS = 0.05  # seconds until a signal is sent again if its exception was lost


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that keeps the exit code.

    If a plain KeyboardInterrupt leaves code run by `exec`, as in `namedtuple`, Python ends with SIGINT whatever the
    exit code (CPython, Python/pythonrun.c, run_eval_code_obj).
    """


def main() -> None:
    """Entry point of the `zoo` command."""
    gc.set_threshold(100_000, 20)  # imports make many objects and no garbage
    if sys.stderr is None:  # closed, as by 2>&-: messages have no place, and no file may get its number
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    asked: list[int] = []  # exit codes of received signals; a library may swallow their exceptions
    pending: list[threading.Timer] = []  # signals to be sent again

    def terminate(*_: object) -> None:
        asked.append(143)
        if (files := sys.modules.get("pipelines.core.files")) is not None:
            getattr(files, "discard_temporary", int)()  # of a module that is being imported: nothing
        sys.exit(143)  # so that clean-up runs

    def interrupt(*_: object) -> None:
        asked.append(130)
        raise Interrupted

    def ignored(lost: Any) -> None:
        """Sends the signal again if a callback of a weak reference, as imports run them, swallowed its exception."""
        if not asked or not isinstance(lost.exc_value, KeyboardInterrupt | SystemExit):
            sys.__unraisablehook__(lost)
            return
        number = signal.SIGINT if asked[-1] == 130 else signal.SIGTERM
        pending.append(threading.Timer(RESEND_SECONDS, os.kill, (os.getpid(), number)))
        pending[-1].daemon = True
        pending[-1].start()

    try:
        sys.unraisablehook = ignored
        signal.signal(signal.SIGTERM, terminate)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless ignored
            signal.signal(signal.SIGINT, interrupt)
        from zoo.cli import app as cli

        cli.main()
        _finish(asked[0] if asked else 0)
    except KeyboardInterrupt:
        _finish(130)
    except SystemExit as end:
        _exit_now(asked[0] if asked else end.code)  # not the error of a file that `terminate` deleted
    except Exception as error:
        _finish(_signalled(error))
        raise
    finally:
        for future in pending:  # a signal during the shutdown of Python would kill the process
            future.cancel()


def _signalled(error: BaseException | None) -> int:
    """Returns the exit code of a signal in the causes of an exception (an import replaces it), else 0."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == 143):
            return 130 if isinstance(error, KeyboardInterrupt) else 143
        error = error.__cause__ or error.__context__
    return 0


def _exit_now(code: Any) -> NoReturn:
    """Ends a command that failed without the shutdown of Python, which threads of libraries can block or crash.

    Threads of Arrow and of engines that still run then may free Python objects, which aborts the process.
    """
    if not isinstance(code, int) or not code:
        sys.exit(code)
    if (processes := sys.modules.get("multiprocessing")) is not None:
        for child in processes.active_children():
            child.terminate()
    if (files := sys.modules.get("pipelines.core.files")) is not None:
        getattr(files, "discard_temporary", int)()  # of a module that was being imported: nothing
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


def _finish(code: int) -> None:
    if code == 130:
        print("zoo: interrupted", file=sys.stderr)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
