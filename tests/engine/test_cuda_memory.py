"""A card that turns out too small while the engine is put together; no GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.runtime.engine.cuda import engine
from duovolt.runtime.engine.cuda.engine import CudaSettings, load_cuda_engine
from duovolt.runtime.parallel.device import SoloDevice


@pytest.mark.parametrize(
    ("keep", "remedy"), [(0, "; a smaller --max-context"), (1 << 30, "; --plain-weights off, a smaller")]
)
def test_one_line_with_what_needs_less(tiny: Path, monkeypatch: pytest.MonkeyPatch, keep: int, remedy: str) -> None:
    asked: list[int] = []

    def full(*_: Any, keep: int, **__: Any) -> None:
        asked.append(keep)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore of it")

    monkeypatch.setattr(engine, "CudaExecutor", full)
    settings = CudaSettings(max_context=64, keep=keep)
    with pytest.raises(EnvironmentFault) as caught:
        load_cuda_engine(tiny / "ranks-1" / "rank-0-of-1", torch.device("cpu"), 1, 0, SoloDevice, settings)
    said = str(caught.value)
    assert asked == [keep] and said.startswith("card cpu has no room: CUDA out of memory. Tried to allocate 2 GiB. ")
    assert remedy in said and said.endswith("or fewer --lanes need less.") and "\n" not in said
