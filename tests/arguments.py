"""Tests that no run of `make test` reaches, since they want a card or take minutes, must fit what they call all the same.

`python ../tests/arguments.py`, from the folder in which the package has its name, asks mypy about every test, and of what it
says minds the arguments of calls that are missing or unknown alone: what else it finds in tests, which have no annotations,
is not worth having.
"""

import re
import sys
import tempfile
from pathlib import Path

from mypy import api

MINDED = re.compile(r"error: (Missing|Too few|Unexpected keyword) .*argument")
CONFIG = Path(__file__).parents[1] / "pyproject.toml"
WITHOUT_TESTS, WITH_TESTS = 'exclude = "/(tests|build|setup)', 'exclude = "/(build|setup)'
_FAILED = 2  # mypy's status where it could not look


def main() -> int:
    """1 where a call does not fit, 2 where mypy could not say."""
    text = CONFIG.read_text()
    assert WITHOUT_TESTS in text, f"{CONFIG}: mypy leaves tests out in another way than this program knows"
    with tempfile.TemporaryDirectory() as folder:
        (config := Path(folder) / "mypy.toml").write_text(text.replace(WITHOUT_TESTS, WITH_TESTS))
        told, errors, status = api.run(["--config-file", str(config), "-p", "duovolt"])
    found = [line for line in told.splitlines() if MINDED.search(line)]
    print("\n".join(found) or f"{told.splitlines()[-1] if told else 'nothing'}: none of a call's arguments.")
    print(errors, end="", file=sys.stderr)
    return _FAILED if status == _FAILED or errors else int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
