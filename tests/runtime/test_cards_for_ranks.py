"""Cards, their code and their memory, judged from facts before a rank is started: fake machines, real directories."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from duovolt.checkpoint.errors import EnvironmentFault, InputError
from duovolt.model.config import ModelConfig
from duovolt.model.memory import kv_bytes_per_token
from duovolt.perf.shapes import configuration
from duovolt.runtime.engine.cuda.plan import (
    MARGIN,
    SPARE,
    Demand,
    fit,
    longest_context,
    page_bytes,
    plain_bytes,
    plan_memory,
)
from duovolt.runtime.rank import preflight as preflight_module
from duovolt.runtime.rank.cards import (
    CONTEXT,
    Card,
    Probe,
    check_code,
    choose_cards,
    cpus_near,
    parse_cpus,
    room_a_rank,
)
from duovolt.runtime.rank.preflight import Refused, Settled, Wishes, preflight
from duovolt.runtime.rank.settle import Unfit, answer, settle

V100 = Card(0, "Tesla V100-PCIE-32GB", "GPU-0", (7, 0), 80, 877, 34_000_000_000, 33_000_000_000, "0000:3b:00.0")
VOLTA_TORCH = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


def card(index: int = 1, **changes: object) -> Card:
    return msgspec.structs.replace(V100, index=index, uuid=f"GPU-{index}", **changes)


def machine(*cards: Card, arches: list[str] = VOLTA_TORCH, **changes: object) -> Probe:
    return msgspec.structs.replace(Probe(list(cards), "2.7.1", "12.6", arches), **changes)


@pytest.fixture
def ranks(tiny: Path) -> Path:
    return tiny / "ranks-2"


def wishes(ranks: Path, **changes: object) -> Wishes:
    directories = [str(ranks / f"rank-{rank}-of-2") for rank in (0, 1)]
    return msgspec.structs.replace(Wishes(directories, None, False, "int8", 2, 3, 512, 4096), **changes)


def tight_bytes(ranks: Path) -> int:
    """Free memory of a card that does not quite hold the longest context, once, for lack of a few MB."""
    one = settle(wishes(ranks, lanes=1, max_context=32768), machine(V100, card(1)))
    return one.planned + MARGIN - (4 << 20)


@pytest.mark.parametrize(
    ("arches", "capability", "runs"),
    [
        (VOLTA_TORCH, (7, 0), True),
        (["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"], (7, 0), False),
        (["sm_75", "sm_80", "compute_80"], (7, 0), False),
        (["sm_60"], (7, 0), False),
        (["compute_60"], (7, 0), True),
        (["sm_70"], (7, 5), True),
        (["sm_90a"], (9, 0), True),
        (["sm_75", "sm_120"], (9, 0), False),
        ([], (7, 0), False),
    ],
)
def test_torch_without_code_for_the_card_is_refused_with_the_list(
    arches: list[str], capability: tuple[int, int], runs: bool
) -> None:
    """L01, L02: told before weights are read, with what each library holds and the remedy."""
    found = machine(card(0, capability=capability), arches=arches, torch="2.9.0", cuda="12.8")
    if runs:
        check_code(found, found.cards[0])
        return
    with pytest.raises(EnvironmentFault) as caught:
        check_code(found, found.cards[0])
    said = str(caught.value)
    assert f"sm_{capability[0]}{capability[1]}" in said and "torch 2.9.0 (CUDA 12.8)" in said
    assert all(arch in said for arch in arches)
    if capability == (7, 0):
        assert "torch==2.7.1" in said


def test_kernels_that_cannot_be_compiled_are_told() -> None:
    """L01: NVRTC 13 beside a torch that would do."""
    fault = "NVRTC 13.0 cannot compile for sm_70: CUDA 13 dropped Volta. Install a 12.x one: pip install ..."
    with pytest.raises(EnvironmentFault, match=r"kernels cannot be had for it.*sm_70, sm_75.*CUDA 13 dropped Volta"):
        choose_cards(machine(V100, kernels={0: fault}), 1, None)


def test_a_card_older_than_a_v100_is_refused() -> None:
    """L02."""
    with pytest.raises(EnvironmentFault, match=r"need compute 7\.0"):
        choose_cards(machine(card(0, capability=(6, 1), name="Tesla P40")), 1, None)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"memory_mhz": 1107}, "memory 1107 MHz"),
        ({"multiprocessors": 72}, "72 multiprocessors"),
        ({"name": "Tesla V100-SXM2-32GB"}, "SXM2"),
    ],
)
def test_unlike_cards_are_refused(other: dict[str, object], said: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"unlike cards|{said}") as caught:
        choose_cards(machine(V100, card(1, **other)), 2, None)
    assert said in str(caught.value) and "unlike cards" in str(caught.value)
    assert [c.index for c in choose_cards(machine(V100, card(1, **other), card(2)), 2, [0, 2])] == [0, 2]


def test_too_few_cards_and_wrong_numbers_are_refused() -> None:
    """L08: two ranks on a machine that shows one card."""
    with pytest.raises(EnvironmentFault, match=r"2 ranks asked for card 1, this machine shows 1 .*--tp N"):
        choose_cards(machine(V100), 2, None)
    with pytest.raises(InputError, match="--devices 1: 2 ranks need 2 cards, or 1,1 to try both on one card"):
        choose_cards(machine(V100, card(1)), 2, [1])
    with pytest.raises(InputError, match=r"--devices 0,0: 1 rank needs 1 card\."):
        choose_cards(machine(V100), 1, [0, 0])
    with pytest.raises(InputError, match="--devices 0,0,0: 2 ranks need 2 cards"):
        choose_cards(machine(V100), 2, [0, 0, 0])
    with pytest.raises(EnvironmentFault, match=r"2 ranks asked for card 1, this machine shows 1"):
        choose_cards(machine(V100), 2, [1, 1])
    with pytest.raises(EnvironmentFault, match=r"no card .*torch finds no usable"):
        choose_cards(machine(reason="torch finds no usable NVIDIA card"), 1, None)


def test_the_cards_memory_node_gives_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, pci = tmp_path / "node", tmp_path / "pci"
    (nodes / "node1").mkdir(parents=True)
    (nodes / "node1" / "cpulist").write_text("0-1,900\n")
    (pci / V100.pci).mkdir(parents=True)
    (pci / V100.pci / "numa_node").write_text("1\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert cpus_near(V100, nodes, pci) == {0, 1}
    (pci / V100.pci / "numa_node").write_text("-1\n")
    assert cpus_near(V100, nodes, pci) == set() == cpus_near(card(9, pci="0000:00:00.0"), nodes, pci)
    assert parse_cpus("0-3,8\n") == {0, 1, 2, 3, 8}


def test_one_decision_for_both_ranks_from_the_smaller_free_memory(ranks: Path) -> None:
    """L05: `--max-context auto` on cards of which one has less memory free."""
    full = settle(wishes(ranks, max_context=None), machine(V100, card(1)))
    assert full.max_context == 32768 and full.pages == 2 * 512 and full.numbers == [0, 1]
    free = tight_bytes(ranks)
    tight = settle(wishes(ranks, max_context=None), machine(V100, card(1, free=free)))
    assert 64 <= tight.max_context < full.max_context and tight.planned <= free
    assert any("context" in line for line in tight.plan) and tight.uuids == ["GPU-0", "GPU-1"]


def test_one_card_for_both_ranks_only_where_it_is_named_twice(ranks: Path) -> None:
    """Half of what is free for each, less the context that the second rank brings."""
    alone = settle(wishes(ranks, max_context=None), machine(V100, card(1)))
    both = settle(wishes(ranks, max_context=None, devices=[1, 1]), machine(V100, card(1)))
    assert (both.uuids, both.numbers, both.shared) == (["GPU-1", "GPU-1"], [1, 1], True)
    assert (both.visible, both.place(0), both.place(1)) == (["GPU-1"], 0, 0)
    assert (alone.visible, alone.place(0), alone.place(1), alone.shared) == (["GPU-0", "GPU-1"], 0, 1, False)
    assert room_a_rank([V100, card(1, free=9_000)]) == 9_000
    assert room_a_rank([V100, V100]) == (33_000_000_000 - CONTEXT) // 2
    free = 2 * tight_bytes(ranks) + CONTEXT
    tight = settle(wishes(ranks, max_context=None, devices=[0, 0]), machine(msgspec.structs.replace(V100, free=free)))
    apart = settle(wishes(ranks, max_context=None), machine(V100, card(1, free=tight_bytes(ranks))))
    assert tight.max_context < both.max_context and (tight.max_context, tight.pages) == (apart.max_context, apart.pages)


def test_too_little_memory_is_refused_with_the_longest_context_that_fits(ranks: Path) -> None:
    """L05: before anything is loaded."""
    with pytest.raises(EnvironmentFault, match=r"(?s)weights .*together .*longest context that fits is ([\d,]+)"):
        settle(wishes(ranks, max_context=32768), machine(V100, card(1, free=tight_bytes(ranks))))
    with pytest.raises(EnvironmentFault, match="Not even a short context fits"):
        settle(wishes(ranks, max_context=None), machine(V100, card(1, free=400_000_000)))


def test_what_another_backend_could_serve_is_told_apart(ranks: Path) -> None:
    """`auto` goes on to the reference for a machine that cannot, not for a wish that cannot be had."""
    with pytest.raises(Unfit, match="no card"):
        settle(wishes(ranks), machine(reason="torch is built without CUDA"))
    with pytest.raises(InputError, match="lanes"):
        settle(wishes(ranks, lanes=9), machine(V100, card(1)))


def test_the_plan_of_the_27b() -> None:
    """L05: figures of the model's sheet, 35,904 bytes a token before the split, and what fits 32 GB cards."""
    config = ModelConfig.from_dict(configuration("qwen3.8-27b"))
    one, two = (Demand(config, tp, weights, "int8", 1, 3, 2048) for tp, weights in ((1, 22 * 10**9), (2, 12 * 10**9)))
    for demand in (one, two):
        assert page_bytes(demand) == 64 * kv_bytes_per_token(config, demand.tp, "int8")
    assert page_bytes(one) == 64 * 35_904
    plan = fit(two, 33_000_000_000, None, 262144)
    assert plan.max_context == 262144 and plan.total < 33_000_000_000
    lanes = fit(replace(two, lanes=4), 24_000_000_000, 262144, 262144)
    assert 4096 <= lanes.pages < 4 * 4096  # one shared pool, smaller than four full lanes
    assert 100_000 < longest_context(one, 33_000_000_000, 262144) < 262144
    assert plan_memory(two, 64, 1).total < plan.total


def test_captured_chunks_have_memory_of_their_own() -> None:
    """As much again as a chunk of theirs takes on its way, and what is kept between graphs; long chunks are not captured."""
    config = ModelConfig.from_dict(configuration("qwen3.8-27b"))
    for tp in (1, 2):
        for chunk in (24, 25, 512, 1024, 1025, 2048):
            demand = Demand(config, tp, 22 * 10**9 // tp, "int8", 2, 3, chunk)
            plan, without = (plan_memory(one, 8192, 256) for one in (demand, replace(demand, captured=False)))
            more = plan.total - without.total
            assert plan.parts["graphs"] - without.parts["graphs"] == more
            assert (more > 0) == (24 < chunk <= 1024)
            if more:
                # x, norms, query and what attention gives, the projection; with two ranks parts and sums, too.
                query, key = 24 * 256 // tp, 4 * 256 // tp
                kept = 10 * 5120 + 4 * 2 * (query + key) + 2 * query + 2 * query + (6 * 5120 if tp > 1 else 0)
                layer = (
                    without.parts["workspace"]
                    - plan_memory(replace(demand, chunk=0, captured=False), 8192, 256).parts["workspace"]
                )
                assert more > layer + chunk * kept  # and plain weights


def test_plain_weights_made_ahead_are_in_the_plan() -> None:
    """Those of so many layers for chunks of any kind, in place of one matrix for captured ones and one for the others."""
    config = ModelConfig.from_dict(configuration("qwen3.8-27b"))
    for tp, largest in ((1, 192 << 20), (2, 2 * 17408 * 5120)):
        rows = 2 * 16 * 128 + 2 * 48 * 128 + 2 * 48 + 48 * 128 + 3 * 17408  # of a layer with the delta rule
        for chunk in (512, 2048):
            demand = Demand(config, tp, 22 * 10**9 // tp, "int8", 2, 3, chunk)
            turn, ahead = (plan_memory(replace(demand, ahead=layers), 8192, 256) for layers in (0.0, 1.5))
            more, kinds = int(1.5 * (rows // tp * 5120)) * 2 + (32 << 20), 2 if chunk == 512 else 1
            assert ahead.parts["plain weights"] == more and not turn.parts["plain weights"]
            assert turn.total + more - kinds * (largest - (20 << 20)) == ahead.total
            assert any("plain weights" in line for line in ahead.lines())
    held = replace(demand, ahead=1.5)
    assert 0 < longest_context(held, 15 * 10**9, 262144) < longest_context(demand, 15 * 10**9, 262144) < 262144
    with pytest.raises(EnvironmentFault, match=r"(?s)plain weights +0\.608 GB.*longest context that fits"):
        fit(held, 15 * 10**9, 262144, 262144)
    little = plan_memory(replace(demand, ahead=0.01), 8192, 256)  # the largest matrix has room
    assert little.parts["plain weights"] == largest + (32 << 20)


def test_plain_weights_stay_in_what_nothing_else_wants() -> None:
    """As many as there are, or as are asked for, where there is room: never at the expense of context, pages or a margin."""
    config = ModelConfig.from_dict(configuration("qwen3.8-27b"))
    rows = (
        16 * (2 * (12 + 2) * 256 + 3072) + 48 * (8240 + 16 + 3072) + 64 * 3 * 8704
    )  # of a rank of two; 8,240 in whole bands
    assert plain_bytes(config, 2) == 2 * 5120 * rows and 1.9 < plain_bytes(config, 1) / plain_bytes(config, 2) < 2
    for chunk, lanes, ahead in ((512, 2, 0.0), (2048, 1, 1.25)):
        off = Demand(config, 2, 10 * 10**9, "int8", lanes, 3, chunk, keys_in_a_row=False, ahead=ahead)
        for free in (15 * 10**9, 17 * 10**9, 33 * 10**9, 140 * 10**9):
            without = fit(off, free, 131072, 262144)
            for keep in (None, 4 << 30, 1 << 40):
                plan = fit(replace(off, keep=keep), free, 131072, 262144)
                wanted = min(plain_bytes(config, 2), keep or plain_bytes(config, 2))
                assert plan.kept == max(0, min(wanted, free - MARGIN - without.total - SPARE))
                assert (plan.max_context, plan.pages) == (without.max_context, without.pages)
                assert plan.total == without.total + plan.kept
                assert plan.parts["plain weights"] == without.parts["plain weights"] + plan.kept
                (line,) = [line for line in plan.lines() if "plain weights" in line] or [""]
                assert (f"{plan.kept / 1e9:.2f} GB kept" in line) == (plan.kept > 0)
        assert plan.kept == plain_bytes(config, 2) and "100% of all" in line


def test_ranks_keep_what_the_smaller_card_has_room_for(ranks: Path) -> None:
    much = settle(wishes(ranks, max_context=512), machine(V100, card(1)))
    none = settle(wishes(ranks, max_context=512, plain_weights=0), machine(V100, card(1)))
    assert much.kept > 0 == none.kept and much.planned == none.planned + much.kept
    assert any("kept, 100% of all" in line for line in much.plan) and not any("kept" in line for line in none.plan)
    assert (
        settle(wishes(ranks, max_context=512, prefill_chunk=96), machine(V100, card(1))).kept == 0
    )  # none would be used
    free = none.planned + MARGIN + SPARE + much.kept // 2
    assert settle(wishes(ranks, max_context=512), machine(V100, card(1, free=free))).kept == much.kept // 2


def test_the_child_answers_in_json(ranks: Path) -> None:
    """The whole way without a card: facts, or one refusal."""
    found = preflight(wishes(ranks, on_cpu=True))
    assert isinstance(found, Settled) and found.max_context == 4096 and found.pages == 2 * 64
    assert msgspec.convert(msgspec.to_builtins(found), Settled) == found
    refused = answer(wishes(ranks, kv="int8", directories=[str(ranks / "rank-0-of-2"), "nowhere"], on_cpu=True))
    assert isinstance(refused, Refused) and "nowhere" in refused.message and refused.exit_code == 2


def test_a_child_that_the_driver_holds_is_not_waited_for(ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent, and beyond the reach of a signal."""
    held: list[subprocess.Popen[bytes]] = []
    kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: held.append(process))
    monkeypatch.setattr(preflight_module, "SECONDS", 0.6)
    monkeypatch.setattr(preflight_module, "_GRACE_SECONDS", 0.1)
    began = time.monotonic()
    try:
        with pytest.raises(EnvironmentFault, match="the driver hangs"):
            preflight(wishes(ranks), [sys.executable, "-c", "import time; time.sleep(30)"])
    finally:
        for process in held:
            kill(process)
            process.wait()
    assert 0.5 < time.monotonic() - began < 10


@pytest.mark.parametrize("code", ["print('{}')", "raise SystemExit('driver says no')", "print('[1, 2]')"])
def test_a_child_that_says_nothing_useful_is_one_message(ranks: Path, code: str) -> None:
    with pytest.raises(EnvironmentFault, match="looking at the cards failed with exit code"):
        preflight(wishes(ranks), [sys.executable, "-c", code])
