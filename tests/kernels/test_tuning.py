"""Choices by card: the file, the grid, and what is refused."""

import msgspec
import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.kernels import tuning
from duovolt.kernels.tuning import STAGES, Choice


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_choice_comes_back_beside_the_choices_of_other_cards():
    assert tuning.read() == {}
    first, second = Choice(STAGES | {"fp8": 5}), Choice(blocks_a_sm=2, cluster=4)
    tuning.store("one card", first)
    path = tuning.store("another", second)
    assert tuning.read() == {"one card": first, "another": second} and path == tuning.path()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"card": {"stages": {"nvfp4": 4}}}',
        '{"card": {"stages": {"nvfp4": 1, "fp8": 3, "half": 3}}}',
        '{"card": {"cluster": 3}}',
        '{"card": {"blocks_a_sm": 99}}',
        '{"card": {"unknown": 1}}',
    ],
)
def test_a_damaged_file_is_named(content):
    tuning.path().parent.mkdir(parents=True)
    tuning.path().write_text(content)
    with pytest.raises(InputError, match=r"tuning\.json: .*duovolt kernels tune"):
        tuning.read()


def test_definitions_name_only_what_is_not_the_default():
    assert Choice().defines == ()
    assert Choice(STAGES | {"fp8": 6}, ablate="loads").defines == ("FP8_STAGES=6", "ABLATE_LOADS")


def test_clusters_even_out_the_multiprocessors_of_sm_90_only():
    assert Choice().grid(160, 132, "sm_80") == (160, 1) and Choice().grid(160, 80, "compute_70") == (160, 1)
    assert Choice().grid(264, 132, "sm_90") == (264, 1)
    assert Choice().grid(160, 132, "sm_90") == (160, 4)
    assert Choice(cluster=2).grid(160, 132, "sm_90") == (160, 2)
    assert Choice(blocks_a_sm=1).grid(4000, 132, "sm_90") == (132, 1)
    assert Choice(blocks_a_sm=2).grid(100, 80, "sm_70") == (100, 1)


def test_shared_memory_of_rings_and_sums():
    sums = 9 * 8 * 33 * 4
    assert Choice().shared_bytes("fp8", 8, "compute_70", 1) == sums
    whole = Choice().shared_bytes("fp8_blocks", 8, "sm_90", 1) - sums
    assert whole == 8 * STAGES["fp8"] * 4 * 544 and Choice().shared_bytes("fp8", 8, "sm_90", 4) - sums == whole // 4
    most = max(Choice().shared_bytes(name, 24, "sm_90", 1) for name in STAGES)
    assert Choice().shared_bytes("any", 24, "sm_90", 1) == most
    with pytest.raises(ValueError, match="stages from 2 to 8"):
        msgspec.convert({"stages": STAGES | {"fp8": 9}}, Choice)
