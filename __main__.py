"""`python -m duovolt`, and the console script: an interrupt is one from the first import on."""

import sys


def entry() -> None:
    """Run the command line of this process and leave with its exit code."""
    try:
        from .cli.main import entry as run

        run()
    except KeyboardInterrupt:
        print("duovolt: interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    entry()
