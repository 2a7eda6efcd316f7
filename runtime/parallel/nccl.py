"""NCCL as a collective of two ranks: parts are gathered and added here, so that sums have rank 0's order and float32.

An all-gather of two ranks moves as many bytes as an all-reduce, which would add in fp16.
"""

from __future__ import annotations

import datetime
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...checkpoint.errors import EnvironmentFault
from ...kernels import mailbox as ops
from ...kernels.libraries import LAST_NCCL_FOR_VOLTA, VOLTA, nccl_arches, nccl_fault
from .device import check_gather, check_reduce
from .handshake import attempt, exchange_facts
from .mailbox import Mailbox
from .owner import owned_name
from .shared import SHARED_DIR

KNOWN_BAD = {
    (2, 26, 2): "illegal memory access from 512 KiB on between some PCIe cards (NVIDIA/nccl issue 2418)",
}
P2P_SWITCH = "NCCL_P2P_DISABLE"


def version() -> tuple[int, int, int]:
    """NCCL's version in this torch. Raises EnvironmentFault if it has none."""
    if not dist.is_available() or not dist.is_nccl_available():
        raise EnvironmentFault("this torch has no NCCL: install one built for CUDA.")
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major), int(minor), int(patch)


def refusal(found: tuple[int, int, int], capability: tuple[int, int]) -> str | None:
    """Why this NCCL must not even be tried on a card of this compute capability; None if it may."""
    if capability != VOLTA or found[:2] <= LAST_NCCL_FOR_VOLTA:
        return None
    return nccl_fault(found, nccl_arches(), capability)


def warning(found: tuple[int, int, int]) -> str | None:
    """What has been reported of this version; the trial tells whether it shows here."""
    return KNOWN_BAD.get(found)


def obey(peer_memory: bool) -> None:
    """Have NCCL keep away from peer memory that the trial distrusts. Call it before the first communicator."""
    if not peer_memory:
        os.environ[P2P_SWITCH] = "1"


class NcclDevice:
    """DeviceCollective over NCCL. Its waits are NCCL's: torch's watchdog ends the process of a rank left alone."""

    size = 2
    name = "nccl"
    halves = False

    def __init__(self, mailbox: Mailbox, device: torch.device, timeout_seconds: float) -> None:
        """Both ranks call it, each with its own device. Raises EnvironmentFault if they do not come together."""
        self.rank = mailbox.rank
        self._device = device
        mine = {"store": owned_name()} if self.rank == 0 else {}
        theirs = exchange_facts(mailbox, mine)
        path = SHARED_DIR / str((mine or theirs)["store"])  # a key-value store of a few bytes; swept if its owner dies
        try:
            attempt(mailbox, partial(self._join, str(path), timeout_seconds))
        finally:
            path.unlink(missing_ok=True)
        ops.prepare(device)

    def _join(self, path: str, timeout_seconds: float) -> tuple[None, dict[str, str]]:
        try:
            dist.init_process_group(
                "nccl",
                store=dist.FileStore(path, 2),
                rank=self.rank,
                world_size=2,
                timeout=datetime.timedelta(seconds=timeout_seconds),
                device_id=self._device,
            )
            dist.all_reduce(torch.zeros(1, device=self._device))
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise EnvironmentFault(str(error).strip().partition("\n")[0]) from None
        return None, {}

    def reduce(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out)
        self._reduce(part, out)

    def reduce_large(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out, limited=False)
        self._reduce(part, out)

    def _reduce(self, part: Tensor, out: Tensor) -> None:
        parts = torch.empty(2, *part.shape, dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(parts, part)
        ops.add(parts[0], parts[1], out)

    def gather(self, part: Tensor, out: Tensor) -> None:
        check_gather(part, out, self.size)
        columns = part.shape[1]
        parts = torch.empty(2, *part.shape, dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(parts, part.contiguous())
        for rank in (0, 1):
            out[:, rank * columns : (rank + 1) * columns].copy_(parts[rank])

    def check(self) -> None:
        return None

    def close(self) -> None:
        """End the communicator."""
        dist.destroy_process_group()
