"""`python -m duovolt`."""

import sys

try:
    from .cli.main import entry

    entry()
except KeyboardInterrupt:  # while modules were still being imported
    print("duovolt: interrupted.", file=sys.stderr)
    sys.exit(130)
