"""What runs in the sandbox's process, by itself: limits, then an answer's code, then the tests of its task.

Only the standard library, and nothing of ours: the text of this file is handed to `python -I -S -c`. Standard input holds
one JSON object: code, tests, nonce, seconds, memory_bytes, user. Prints the nonce as its last line if all tests held.
"""

import importlib
import json
import os
import resource
import sys
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Loaded before root becomes nobody, who may not be allowed to read the interpreter's own folder.
_LIBRARY = (
    "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq",
    "itertools", "math", "operator", "random", "re", "statistics", "string", "textwrap", "traceback", "typing",
)  # fmt: skip
# Events of sys.audit that no short function needs: other processes, the network, foreign code, other people's files.
_REFUSED = (
    "subprocess.", "os.system", "os.exec", "os.fork", "os.spawn", "os.posix_spawn", "pty.", "socket.", "ctypes.",
    "os.kill", "signal.pthread_kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink",
    "os.truncate", "os.chmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr", "shutil.", "fcntl.",
    "resource.setrlimit", "sqlite3.",
)  # fmt: skip


def _limit(seconds: int, memory_bytes: int, user: int | None) -> None:
    if user is not None:  # root is exempt from the limit on processes, so it must not stay root
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    limits = (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),  # no byte into any file; pipes are not files
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),  # no new process, no new thread; this one already runs
        (resource.RLIMIT_CORE, 0),
    )
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the first has a signal of its own
    for which, value in limits:
        resource.setrlimit(which, (value, value))


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_REFUSED):
        raise PermissionError(f"the sandbox refuses {event}")
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & _WRITES):
            raise PermissionError("the sandbox refuses to write files")


def main() -> None:
    """Ends with 0 and the nonce, or with 1 and one line about what went wrong."""
    task = json.loads(sys.stdin.buffer.read())
    for name in _LIBRARY:
        importlib.import_module(name)
    _limit(task["seconds"], task["memory_bytes"], task["user"])
    sys.addaudithook(_refuse)
    names: dict[str, Any] = {"__name__": "answer"}
    for part in ("code", "tests"):
        try:
            exec(compile(task[part], part, "exec"), names)
        except BaseException as error:
            said = f"{part}: {type(error).__name__}: {error}"
            sys.__stdout__.write("\n" + said[:300].replace("\n", " ") + "\n")  # type: ignore[union-attr]
            sys.__stdout__.flush()  # type: ignore[union-attr]
            os._exit(1)
    sys.__stdout__.write("\n" + task["nonce"] + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
    os._exit(0)


if __name__ == "__main__":
    main()
