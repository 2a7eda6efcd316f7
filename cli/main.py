"""`duovolt`: dispatch to a command, and turn errors into one message and an exit code.

Exit codes: 0 done, 1 failed check, 2 bad usage or input, 3 environment (disk, GPU, driver), 130 interrupted.
"""

import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence

from .. import __version__
from ..checkpoint.errors import DuovoltError
from .interrupts import INTERRUPTS
from .parser import Parser
from .streams import settle_streams

# Command -> (module in this package, one line of help). A module is only imported when its command runs.
COMMANDS = {
    "demo": ("demo", "run every stage on the bundled tiny model, on a CPU"),
    "download": ("download", "fetch a checkpoint from a hub, resumed and digest-checked"),
    "inspect": ("inspect", "what a directory holds, from headers and manifest alone"),
    "plan": ("plan", "dry run: the fate of every tensor, sizes on disk and card"),
    "convert": ("convert", "a source checkpoint to nvfp4 and fp8 in V100 layouts"),
    "shard": ("shard", "split a converted directory over tensor-parallel ranks"),
    "verify": ("verify", "prove that no bit went astray between the stages"),
    "dequantize": ("dequantize", "a converted directory or its ranks back to a plain checkpoint"),
    "serve": ("serve", "serve ranks over HTTP: one proxy, one process a rank"),
    "chat": ("chat", "talk to a running server"),
    "eval": ("eval", "quality of a checkpoint or a running server: text, graded questions; two results compared"),
    "compare": ("compare", "layer by layer: two backends, or one card and two"),
    "ledger": ("ledger", "bytes of a decode round, from headers alone"),
    "predict": ("predict", "tokens a second of a card, a model and a depth, from bytes and bandwidth"),
    "synth": ("synth", "random or sparse checkpoints of a real model's shapes"),
    "doctor": ("doctor", "cards, links, driver, libraries: what will work, what will not, what to do"),
    "selftest": ("selftest", "right answers and speed of a card, in a report that can be sent and read"),
    "bench": ("bench", "measure beside peers: kernels, whole stages, the server"),
    "kernels": ("kernels", "compile the CUDA kernels ahead of time"),
    "rank": ("rank", "one rank process (started by serve)"),
}
HIDDEN = {"rank"}
NO_MEMORY = re.compile(r"DefaultCPUAllocator|out of memory")  # torch has no MemoryError
BAD_PATH = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)  # the user's mistake, not the disk's


def _parser(command: str) -> tuple[Parser, object]:
    module_name, summary = COMMANDS[command]
    module = importlib.import_module(f".{module_name}", __package__)
    parser = Parser(
        prog=f"duovolt {command}", description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.configure(parser)
    parser.reads = getattr(module, "READS", None)  # a command of tasks has one for each of them
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser, module


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: duovolt COMMAND [options]", "", __doc__.split("\n\n")[0].split(":")[0] + " " + __version__, ""]
    lines += [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items() if name not in HIDDEN]
    lines += ["", "`duovolt COMMAND --help` shows a command's options and an example. Start with `duovolt demo`."]
    return "\n".join(lines)


def _report(error: BaseException, debug: bool) -> int:
    if debug:
        raise error
    if isinstance(error, DuovoltError):
        print(f"duovolt: {error}", file=sys.stderr)
        return error.exit_code
    interrupts = (isinstance(one, KeyboardInterrupt) for one in (error, error.__context__))
    if any(interrupts) or INTERRUPTS.seen:  # others fail of it: a graph's capture, a library that is imported by half
        print("duovolt: interrupted.", file=sys.stderr)
        return 130
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY.search(str(error))):
        print("duovolt: out of memory.", file=sys.stderr)
        return 3
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("duovolt"):
        print(
            f"duovolt: the library {error.name!r} is missing. Install duovolt with its extras: "
            'pip install "duovolt[serve]" (add cuda for a GPU).',
            file=sys.stderr,
        )
        return 3
    if isinstance(error, OSError):
        print(f"duovolt: {error.filename or 'system'}: {error.strerror or error}.", file=sys.stderr)
        return 2 if error.errno in BAD_PATH else 3
    print(
        f"duovolt: unexpected {type(error).__name__}: {error}. Run again with --debug and report it.", file=sys.stderr
    )
    return 1


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"duovolt {__version__}")
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        print(f"duovolt: no command {command!r}. `duovolt --help` lists them.", file=sys.stderr)
        return 2
    parser, module = _parser(command)
    try:
        args = parser.parse(rest)
    except SystemExit as stopped:  # argparse has printed help or usage
        return int(stopped.code or 0)
    return int(module.run(args))  # type: ignore[attr-defined]


def _flush(code: int) -> int:
    """Push out what was printed while errors still have a name. Nobody reading (`| head`) changes no verdict."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        return code or _report(error, False)
    return code


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str]) -> int:
    """Run one command line (without the program's name); the exit code.

    A command whose output nobody reads any more (`| head`) ends with 1: what it would have said is not known.
    """
    try:
        return _flush(_dispatch(argv))
    except BrokenPipeError:
        _drop_output()
        return 1
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, "--debug" in argv)


def entry() -> None:
    """Console script."""
    settle_streams()
    INTERRUPTS.watch()
    sys.exit(main(sys.argv[1:]))
