"""`python -m duovolt`."""

from .cli.main import entry

entry()
