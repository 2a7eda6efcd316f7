"""What holds for every test."""

import signal

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
