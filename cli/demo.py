"""`duovolt demo`: every stage on the bundled tiny model, typed as a user would type it, then one question."""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from ..checkpoint.errors import DuovoltError, EnvironmentFault
from ..convert.standin import HubStandIn
from ..runtime.parallel.unwinding import unwound_by_signals
from .layers import PREFIX
from .reads import ALWAYS, Reads
from .serve import server_options

EXAMPLE = """example:
  duovolt demo
  duovolt demo --dir my-demo --question "What does the sorted function do?"

The directory stays; running the demo again checks what is there instead of making it anew."""

REPOSITORY = "duovolt/tiny"
QUESTION = "What does the len function do?"
START_SECONDS = 90


READS = Reads({ALWAYS: "dir question"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("--dir", type=Path, default=Path("demo-work"), help="where to work (default: demo-work)")
    parser.add_argument("--question", default=QUESTION, help=f"what to ask (default: {QUESTION})")


@contextlib.contextmanager
def bundled_hub() -> Iterator[HubStandIn]:
    """A local hub, over real HTTP, that serves the bundled model as `duovolt/tiny`."""
    with (
        resources.as_file(resources.files("duovolt.tiny") / "checkpoint") as checkpoint,
        tempfile.TemporaryDirectory(prefix="duovolt-hub-") as root,
    ):
        shutil.copytree(checkpoint, Path(root) / REPOSITORY)
        with HubStandIn(Path(root)) as hub:
            yield hub


class _Demo:
    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.stage = 0
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def begin(self, title: str) -> None:
        """The next stage's headline."""
        self.stage += 1
        self.say(f"\n[{self.stage}/6] {title}")

    def run(self, command: Sequence[str], proved: str) -> None:
        """Show a command, run it as the command line would, and say what it proved. Raises DuovoltError if it fails."""
        from .main import main

        self.say(f"$ duovolt {shlex.join(command)}")
        began = time.monotonic()
        code = main([*command, *(["--quiet"] if self.quiet else [])])
        sys.stdout.flush()
        if code:
            raise _Stopped(
                f"stage {self.stage} ({command[0]}) ended with exit code {code}; its message stands above.", code
            )
        self.say(f"=> {proved} ({time.monotonic() - began:.1f} s)")


class _Stopped(DuovoltError):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@contextlib.contextmanager
def served(ranks: Path, quiet: bool) -> Iterator[str]:
    """A running `duovolt serve` over `ranks` on a free port; yields its URL. Raises EnvironmentFault if it will not start."""
    command = [sys.executable, "-m", "duovolt", "serve", str(ranks), "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    url, lines, ready = [""], list[str](), threading.Event()

    def watch() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "ready on http" in line:
                url[0] = line.split("ready on ")[1].split()[0]
                if not quiet:
                    print(line.rstrip(), flush=True)
                ready.set()
        ready.set()

    threading.Thread(target=watch, daemon=True).start()
    try:
        if not ready.wait(START_SECONDS) or not url[0]:
            raise EnvironmentFault(
                "the server did not start: " + ("".join(lines[-5:]).strip() or "it said nothing") + "."
            )
        yield url[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_HERE = "127.0.0.1,localhost"
_OF_OTHERS = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@contextlib.contextmanager
def among_ourselves() -> Iterator[None]:
    """Without what the environment says of other hubs and other servers: everything here is asked of this machine.

    No proxy is in between, a machine that shall stay offline asks nobody else, and settings of a user's own server stay his.
    """
    kept = dict(os.environ)
    for name in [*_OF_OTHERS, f"{PREFIX}CONFIG", *(option.variable for option in server_options())]:
        os.environ.pop(name, None)
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), _HERE)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def run(args: argparse.Namespace) -> int:
    with among_ourselves(), unwound_by_signals():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    demo = _Demo(args.quiet)
    work: Path = args.dir
    source, converted, ranks = work / "source", work / "converted", work / "ranks"
    demo.say("duovolt demo: the bundled tiny model of the Qwen3.5 family, every stage, on this CPU.")
    demo.begin("Download, here from a local stand-in of the hub, over real HTTP")
    with bundled_hub() as hub:
        demo.run(
            ["download", REPOSITORY, str(source), "--endpoint", hub.url],
            "every file has the size and the content digest that the hub names, at one pinned commit.",
        )
    demo.begin("Convert to nvfp4 and fp8, in V100 layouts")
    demo.run(
        ["convert", str(source), str(converted)],
        "every tensor of the family is accounted for, and each stored word has a digest in the manifest.",
    )
    demo.begin("Split for tensor parallelism over two ranks")
    demo.run(
        ["shard", str(converted), str(ranks), "--tp", "2"],
        "each rank holds its heads, rows and columns of every matrix; the rest lies on both.",
    )
    demo.begin("Verify, with code that shares nothing with the splitter")
    demo.run(
        ["verify", "--source", str(source), "--converted", str(converted), "--ranks", str(ranks)],
        "the two ranks join to the converted words bit for bit, and the converted words are the source's within "
        "the errors above.",
    )
    demo.begin("Measure what quantising cost, on text the model never saw")
    demo.run(
        ["eval", str(source), str(converted), "--score-bytes", "8000", "--prompts", "4"],
        "the price of nvfp4 and fp8 on this model is the last line above, measured on the same text in one run.",
    )
    demo.begin("Serve with one proxy and two rank processes, and ask")
    serving = f"duovolt serve {shlex.quote(str(ranks))}"
    demo.say(f"$ {serving}")
    with served(ranks, args.quiet) as url:
        demo.run(
            ["chat", "--url", url, "--once", args.question, "--temperature", "0"],
            "both ranks computed every token and compared a lockstep record after each step.",
        )
    demo.say(f"\nAll stages done in {time.monotonic() - demo.started:.0f} s. The directories stay in {work}; next: "
             f"{serving}, then open the address it prints.")  # fmt: skip
    return 0
