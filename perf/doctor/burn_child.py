"""The process that keeps one card at work: products that heat it and reads that keep its memory busy.

`python -m duovolt.perf.doctor.burn_child SECONDS`, the card visible as 0; says `ready`, and begins at the first line it is given.
"""

import sys
import time

import torch

SIDE = 4096
READ_BYTES = 256 << 20
_TURNS_AHEAD = 4


def main() -> int:
    seconds = float(sys.argv[1])
    device = torch.device("cuda", 0)
    left, right = (torch.randn(SIDE, SIDE, device=device).half() for _ in range(2))
    out = torch.empty_like(left)
    much = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device=device)
    torch.mm(left, right, out=out)
    torch.cuda.synchronize()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return 0  # the parent is gone
    end = time.monotonic() + seconds
    running: list[torch.cuda.Event] = []
    while time.monotonic() < end:
        for _ in range(8):
            torch.mm(left, right, out=out)
        much.add_(1.0)
        event = torch.cuda.Event()
        event.record()
        running.append(event)
        if len(running) > _TURNS_AHEAD:
            running.pop(0).synchronize()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
