"""`zoo`, and `python -m zoo`: Ctrl-C while the command is still being imported is one line, too."""

import sys


def main() -> None:
    """Entry point of the `zoo` command."""
    try:
        from zoo import cli
    except KeyboardInterrupt:
        print("zoo: interrupted", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
