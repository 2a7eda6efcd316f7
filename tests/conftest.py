"""What holds for every test."""

import signal
from pathlib import Path

import pytest

# A shell that starts a job in the background lets it ignore SIGINT, and so all its children would: the tests of Ctrl-C
# need the usual handler, which an exec turns back to the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `gpu` is skipped where there is none, whatever the test itself says."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with recipe v100: `converted`, and `ranks-1` and `ranks-2` of it. Not to be written to."""
    from duovolt.convert.pipeline import convert
    from duovolt.convert.recipe import load_recipe
    from duovolt.shard.split import shard

    folder = tmp_path_factory.mktemp("tiny")
    bundled = Path(__file__).parents[1] / "tiny" / "checkpoint"
    convert(bundled, folder / "converted", load_recipe("v100"), 1, lambda count: None)
    for size in (1, 2):
        shard(folder / "converted", folder / f"ranks-{size}", size)
    return folder
