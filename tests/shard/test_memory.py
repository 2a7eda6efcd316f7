"""Memory does not grow with the model: F09."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from duovolt.checkpoint.container import NUMPY_DTYPE
from duovolt.tests.support import maker

BOUND_MB = 130  # interpreter, libraries and a few bands; one tensor below has 205 MB


def ones(weight: str, part: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.ones(shape, NUMPY_DTYPE[dtype])


def test_a_tensor_larger_than_the_memory_used(tmp_path: Path) -> None:
    """F09: bounded by a constant, whatever the size of a tensor."""
    config = maker.config(num_hidden_layers=1, vocab_size=200_000, hidden_size=512)
    maker.converted(tmp_path / "converted", config, words=ones)
    assert (tmp_path / "converted" / "model-00001-of-00001.safetensors").stat().st_size > 300e6
    command = [
        sys.executable,
        "-m",
        "duovolt",
        "shard",
        str(tmp_path / "converted"),
        str(tmp_path / "ranks"),
        "--tp",
        "2",
    ]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"peak memory ([\d,]+) MB", out)
    assert found is not None and int(found[1].replace(",", "")) < BOUND_MB
    code = (
        "import sys; from duovolt.cli.main import main; from duovolt.cli.shard import peak_memory;"
        "status = main(sys.argv[1:]); print(peak_memory() // 1_000_000); sys.exit(status)"
    )
    arguments = ["verify", "--converted", str(tmp_path / "converted"), "--ranks", str(tmp_path / "ranks"), "--quiet"]
    out = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert int(out.split()[-1]) < BOUND_MB
