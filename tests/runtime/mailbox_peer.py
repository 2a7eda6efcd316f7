"""Rank 1 of the mailbox tests, in a process of its own: one JSON job a line in, one answer a line out."""

from __future__ import annotations

import json
import sys

import numpy as np

from duovolt.runtime.parallel.mailbox import Mailbox, MailboxMismatch, MailboxTimeout
from duovolt.runtime.parallel.region import Region
from duovolt.runtime.parallel.shared import SharedFile


def values(seed: int, size: int) -> np.ndarray:
    """Floats over the whole range of bit patterns that are not NaN."""
    bits = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    floats = bits.view(np.float32)
    return np.where(np.isnan(floats), np.float32(seed), floats).astype(np.float32)


def main() -> None:
    name, slot, first_step, timeout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    region = Region(SharedFile.attach(name).memory, slot)
    mailbox = Mailbox(region, 1, timeout, first_step=first_step)
    for line in sys.stdin:
        job = json.loads(line)
        mailbox.timeout_seconds = job.get("timeout", timeout)
        try:
            if job["op"] == "exchange":
                result = mailbox.exchange(values(job["seed"], job["size"]))
            else:
                import torch

                from duovolt.runtime.parallel.mailbox import MailboxCollective

                collective = MailboxCollective(mailbox)
                tensor = torch.from_numpy(values(job["seed"], int(np.prod(job["shape"])))).reshape(job["shape"])
                result = getattr(collective, job["op"])(tensor).numpy()
            answer = {"bits": result.tobytes().hex(), "step": mailbox.step}
        except (MailboxTimeout, MailboxMismatch) as error:
            answer = {"error": type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
