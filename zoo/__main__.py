"""`zoo`, and `python -m zoo`: signals while the command is still being imported end it in order, too."""

import signal
import sys


def main() -> None:
    """Entry point of the `zoo` command."""
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clean-up runs
        from zoo import cli
    except KeyboardInterrupt:
        print("zoo: interrupted", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
