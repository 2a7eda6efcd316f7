"""Choices by card: the file, the grid, and what is refused."""

import msgspec
import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.kernels import tuning
from duovolt.kernels.tuning import STAGES, Choice, spread


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_choice_comes_back_beside_the_choices_of_other_cards():
    assert tuning.read() == {}
    first, second = (
        Choice(STAGES | {"fp8": 5}, rows=0),
        Choice(blocks_a_sm=2, asked=4, early=frozenset({"exchange"})),
    )
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
        '{"card": {"ablate": "everything"}}',
        '{"card": {"ablate": "loads"}}',  # for measuring only: what it computes is wrong
        '{"card": {"blocks_a_sm": 99}}',
        '{"card": {"wide_up_to": 5000}}',
        '{"card": {"wide_from": 0}}',
        '{"card": {"unknown": 1}}',
        '{"card": {"asked": -1}}',
        '{"card": {"asked": 257}}',
        '{"card": {"early": ["norm"]}}',
        '{"card": {"rows": 8}}',
        '{"card": {"half_stages": {"nvfp4": 3}}}',
        '{"card": {"mixed_stages": 1}}',
    ],
)
def test_a_damaged_file_is_named(content):
    tuning.path().parent.mkdir(parents=True)
    tuning.path().write_text(content)
    with pytest.raises(InputError, match=r"tuning\.json: .*duovolt kernels tune"):
        tuning.read()
    tuning.store("a card", Choice(blocks_a_sm=2))  # as the message promises
    assert tuning.read() == {"a card": Choice(blocks_a_sm=2)}


def test_definitions_name_only_what_is_not_the_default():
    assert Choice().defines == ()
    assert Choice(STAGES | {"fp8": 6}, ablate="loads").defines == ("FP8_STAGES=6", "ABLATE_LOADS")
    assert Choice(rows=16).defines == (), "both forms are compiled always"
    other = Choice(half_stages={"nvfp4": 2, "fp8": 3}, mixed_stages=3)
    assert other.defines == ("NVFP4_HALF_STAGES=2", "FP8_HALF_STAGES=3", "FP8_MIXED_STAGES=3")


def test_a_file_from_before_there_were_half_bands_is_read():
    tuning.path().parent.mkdir(parents=True)
    tuning.path().write_text('{"card": {"stages": {"nvfp4": 2, "fp8": 4, "half": 2}, "blocks_a_sm": 3, "ablate": ""}}')
    assert tuning.read() == {"card": Choice(STAGES | {"fp8": 4}, 3)}


def test_rows_of_an_item_are_forced_or_those_that_end_sooner():
    def rows(
        chosen: Choice, kernel: str, items: int, paired: bool = False, arch: str = "sm_90", tokens: int = 8
    ) -> int:
        return chosen.rows_of(kernel, items, paired, 132, arch, tokens)

    plain, forced, free = Choice(rows=32), Choice(rows=16), Choice()
    assert rows(plain, "nvfp4", 160) == rows(plain, "fp8", 224) == 32
    assert [rows(forced, kernel, 160) for kernel in ("nvfp4", "fp8", "fp8_blocks", "half", "any")] == [
        16,
        16,
        32,
        32,
        32,
    ]
    assert rows(forced, "nvfp4", 160, arch="sm_70") == 32 and rows(free, "fp8", 224, arch="compute_70") == 32
    assert rows(free, "nvfp4", 160) == 16  # three halves against two bands
    assert rows(free, "nvfp4", 132) == 32  # a band each
    assert rows(free, "nvfp4", 160, tokens=16) == 32 and rows(free, "fp8", 224, tokens=24) == 32
    assert (
        rows(free, "nvfp4", 272, paired=True) == rows(free, "nvfp4", 272, paired=True, tokens=24) == 16
    )  # five against six
    assert rows(free, "nvfp4", 264, paired=True) == 32  # no sooner
    assert [rows(free, "fp8", items) for items in (100, 160, 224, 448, 2048)] == [16, 16, 16, 16, 32]
    assert rows(free, "fp8", 272, paired=True) == 32


def test_half_bands_share_the_sums_and_rings_of_half_the_rows():
    sums = 9 * 8 * 17 * 4
    assert Choice().shared_bytes("nvfp4_halves", 8, "sm_90") == sums + 8 * 3 * 8 * 160
    four = Choice(half_stages={"nvfp4": 3, "fp8": 4})
    assert four.shared_bytes("fp8_halves", 8, "sm_90") == sums + 8 * 4 * 4 * 288
    assert four.shared_bytes("fp8_deep", 8, "sm_90") == sums + 8 * 5 * 4 * 288


def test_rings_of_fp8_are_deeper_where_few_blocks_share_a_multiprocessor():
    for kernel, blocks, tokens, wanted in (
        ("fp8", 320, 8, "deep"),
        ("fp8", 396, 8, "deep"),
        ("fp8", 397, 8, "halves"),
        ("fp8", 320, 16, "halves"),
        ("nvfp4", 320, 8, "halves"),
    ):
        assert Choice.halves_of(kernel, blocks, 132, tokens) == wanted, (kernel, blocks, tokens)


def test_blocks_share_the_bands():
    assert Choice().blocks(160, 132) == 160
    assert Choice(blocks_a_sm=1).blocks(4000, 132) == 132 and Choice(blocks_a_sm=2).blocks(100, 80) == 100
    assert Choice().blocks(544, 132, 3) == 396 and Choice(blocks_a_sm=2).blocks(544, 132, 3) == 264
    assert Choice(blocks_a_sm=16).blocks(544, 132, 3) == 544, "a block an item"


@pytest.mark.parametrize("in_all", [100 << 10, 164 << 10, 228 << 10])
@pytest.mark.parametrize("blocks", [1, 132, 133, 160, 264, 265, 396])
def test_overlapping_launches_pile_no_blocks_up(in_all, blocks):
    """As many blocks fit a multiprocessor as an even share has, not one more."""
    share = -(-blocks // 132)
    asked = spread(1 << 10, blocks, 132, in_all - 1024, in_all)
    assert share * (asked + 1024) <= in_all < (share + 1) * (asked + 1024)


def test_blocks_that_need_more_than_their_share_keep_it():
    assert spread(90 << 10, 396, 132, 227 << 10, 228 << 10) == 90 << 10
    assert spread(1 << 10, 10, 132, 99 << 10, 228 << 10) == 99 << 10, "no more than a block may have"


def test_shared_memory_of_rings_and_sums():
    sums = 9 * 8 * 33 * 4
    assert Choice().shared_bytes("fp8", 8, "compute_70") == sums
    whole = Choice().shared_bytes("fp8_blocks", 8, "sm_90") - sums
    assert whole == 8 * STAGES["fp8"] * 4 * 544
    most = max(Choice().shared_bytes(name, 24, "sm_90") for name in STAGES)
    assert Choice().shared_bytes("any", 24, "sm_90") == most
    with pytest.raises(ValueError, match="stages from 2 to 8"):
        msgspec.convert({"stages": STAGES | {"fp8": 9}}, Choice)


def test_default_rings_fit_every_card_that_has_them():
    most = max(Choice().shared_bytes("any", tokens, "sm_86") for tokens in (8, 16, 24))
    assert most <= 99 << 10  # of a block on sm_86, sm_89 and sm_120


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (Choice(), "plain"),
        (Choice(rows=16, blocks_a_sm=2), "plain"),  # these change no bit
        (Choice(wide_up_to=256), "wide:49-256"),
        (Choice(slices=False), "plain,bands"),
        (Choice(wide_from=25, wide_up_to=96, overlap_dequantising=True), "wide:25-96,beside"),
    ],
)
def test_what_rounds_a_prompt_differently_is_told_apart(chosen, words):
    assert chosen.prompts == words


def test_plain_weights_are_made_ahead_where_that_was_measured_or_a_choice_says_so():
    for capability, layers in (((7, 0), 0), ((8, 9), 0), ((9, 0), tuning.AHEAD), ((12, 0), tuning.AHEAD)):
        assert Choice().layers_ahead(capability) == layers
        assert Choice(plain_ahead=2.0).layers_ahead(capability) == 2 and not Choice(plain_ahead=0).layers_ahead(
            capability
        )
        assert not Choice(overlap_dequantising=True).layers_ahead(capability)
        assert not Choice(plain_ahead=2.0, overlap_dequantising=True).layers_ahead(capability)
    for wrong in (
        {"plain_ahead": -1.0},
        {"plain_ahead": 9.0},
        {"plain_ahead": float("nan")},
        {"sparing_up_to": -1},
        {"sparing_up_to": 1 << 17},
    ):
        with pytest.raises(ValueError, match="plain_ahead from 0 to 8"):
            msgspec.convert(wrong, Choice)


def test_a_product_of_few_tokens_leaves_an_eighth_of_the_multiprocessors_in_pairs():
    kept = [Choice(sparing_up_to=512).multiprocessors_of(tokens, 132) for tokens in (97, 512, 513, 2048)]
    assert kept == [116, 116, 0, 0] and Choice().multiprocessors_of(512, 132) == 116
    assert Choice(sparing_up_to=0).multiprocessors_of(100, 132) == 0 and Choice().multiprocessors_of(512, 15) == 0
