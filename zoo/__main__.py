"""`zoo`, and `python -m zoo`: signals while modules are being imported end it in order, too."""

import gc
import os
import signal
import sys
import threading
from typing import Any

AGAIN = 0.05  # seconds until a signal whose exception Python could not raise is sent again


class Interrupted(KeyboardInterrupt):
    """Python ends by SIGINT itself, whatever exit code is asked for, once a KeyboardInterrupt, and no class below it,
    left a text that exec runs, as in `namedtuple` (CPython, Python/pythonrun.c, run_eval_code_obj).
    """


def main() -> None:
    """Entry point of the `zoo` command."""
    gc.set_threshold(100_000, 20)  # importing libraries makes many objects, and none of them garbage
    asked: list[int] = []  # exit codes of signals: what they raise may be lost where a library ignores what it catches
    pending: list[threading.Timer] = []  # signals to be sent again

    def terminate(*_: object) -> None:
        asked.append(143)
        sys.exit(143)  # so that clean-up runs

    def interrupt(*_: object) -> None:
        asked.append(130)
        raise Interrupted

    def ignored(lost: Any) -> None:
        """Python prints what is raised in a weak reference's callback (imports run some) and goes on: we do not."""
        if not asked or not isinstance(lost.exc_value, KeyboardInterrupt | SystemExit):
            sys.__unraisablehook__(lost)
            return
        number = signal.SIGINT if asked[-1] == 130 else signal.SIGTERM
        pending.append(threading.Timer(AGAIN, os.kill, (os.getpid(), number)))
        pending[-1].daemon = True
        pending[-1].start()

    try:
        sys.unraisablehook = ignored
        signal.signal(signal.SIGTERM, terminate)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not one that is ignored
            signal.signal(signal.SIGINT, interrupt)
        from zoo.cli import app as cli

        cli.main()
        _end(asked[0] if asked else 0)
    except KeyboardInterrupt:
        _end(130)
    except Exception as error:
        _end(_signalled(error))
        raise
    finally:
        for each in pending:  # what was raised ended it after all: as Python ends, a signal would kill it
            each.cancel()


def _signalled(error: BaseException | None) -> int:
    """The exit code that a signal asked for where an extension's import made another exception of it, else 0."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == 143):
            return 130 if isinstance(error, KeyboardInterrupt) else 143
        error = error.__cause__ or error.__context__
    return 0


def _end(code: int) -> None:
    if code == 130:
        print("zoo: interrupted", file=sys.stderr)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
