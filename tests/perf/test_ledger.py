"""The ledger against the weights and caches that the runtime really builds, and against published sizes."""

import json
from pathlib import Path

import pytest
import torch

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings.weights import read_weight, weights_of
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.manifest import read_manifest
from duovolt.cli.main import main
from duovolt.kernels import attention
from duovolt.kernels.delta import DeltaState, DeltaWeights
from duovolt.kernels.kvcache import KVCache
from duovolt.kernels.weights import Fp8Weight, HalfWeight, Nvfp4Weight, Weight
from duovolt.perf.ledger import Ledger, Shape, fused, kv_bytes, ledger_of, passes
from duovolt.perf.model_source import sheet_at
from duovolt.perf.sheet import Layer, Sheet

TINY = Path(__file__).parents[2] / "tiny" / "checkpoint"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ledger")
    assert main(["convert", str(TINY), str(base / "converted"), "--recipe", "v100", "--quiet"]) == 0
    assert main(["shard", str(base / "converted"), str(base / "ranks"), "--tp", "2", "--quiet"]) == 0
    return base


def built(directory: Path, name: str) -> Weight:
    """The weight as the kernels hold it, from the stored bytes."""
    checkpoint, manifest = Checkpoint.open(directory), read_manifest(directory)
    parts = weights_of(manifest)[name]
    records = {part: manifest.tensors[stored] for part, stored in parts.items()}
    tensors = {part: torch.from_numpy(checkpoint.read(stored).copy()) for part, stored in parts.items()}
    words = records.get("words")
    if words is None or words.layout == "canonical":
        return HalfWeight.of(torch.from_numpy(read_weight(checkpoint, manifest, name)).half())
    if words.encoding == "nvfp4":
        return Nvfp4Weight(tensors["words"], tensors["block_scale"], tensors["global_scale"].reshape(1))
    return Fp8Weight(tensors["words"], tensors["row_scale"].reshape(-1))


def matrices(sheet: Sheet) -> list:
    assert sheet.mtp is not None
    found = [sheet.head, sheet.mtp.fc]
    for layer in (*sheet.layers, sheet.mtp.layer):
        found += [*layer.inputs, layer.output, layer.gate, layer.up, layer.down]
    return found


@pytest.mark.parametrize("part", ["converted", "ranks/rank-0-of-2", "ranks/rank-1-of-2"])
def test_every_matrix_has_the_bytes_of_the_weight_that_is_built(ranks: Path, part: str) -> None:
    sheet = sheet_at(str(ranks / part), None, None)
    held = matrices(sheet)
    for matrix in held:
        weight = built(ranks / part, matrix.name)
        assert (weight.shape, weight.nbytes) == ((matrix.rows, matrix.columns), matrix.nbytes), matrix
    encodings = {matrix.encoding for matrix in held}
    assert {"nvfp4", "fp8_e4m3", "bf16"} <= encodings  # all three forms were compared


def test_a_round_reads_each_matrix_once_a_launch(ranks: Path) -> None:
    directory = ranks / "ranks" / "rank-0-of-2"
    sheet = sheet_at(str(directory), None, None)
    assert sheet.mtp is not None
    ledger = ledger_of(sheet, Shape(context=100, drafts=2))

    def layer_bytes(layer: Layer) -> int:
        held = (*layer.inputs, layer.output, layer.gate, layer.up, layer.down)
        return sum(built(directory, matrix.name).nbytes for matrix in held)

    head = built(directory, sheet.head.name).nbytes
    draft = built(directory, sheet.mtp.fc.name).nbytes + layer_bytes(sheet.mtp.layer)
    wanted = 3 * head + 2 * draft + sum(map(layer_bytes, sheet.layers))
    found = sum(launch.weights for launch in ledger.launches if launch.family in ("linear", "head"))
    assert found == wanted
    names = [launch.what for launch in ledger.launches if launch.part == "verify" and launch.family == "linear"]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kv", ["int8", "fp16"])
def test_kv_and_state_are_those_of_the_caches(kv: str) -> None:
    sheet = sheet_at("qwen3.8-27b", 2, None)
    pool = KVCache.empty(4, sheet.heads.kv, int8=kv == "int8")
    scales = [scale.nbytes for scale in (pool.key_scales, pool.value_scales) if scale is not None]
    position = (pool.keys.nbytes + pool.values.nbytes + sum(scales)) / (4 * 64)
    assert position == kv_bytes(sheet.heads.kv, sheet.heads.dim, kv)
    ledger = ledger_of(sheet, Shape(context=1000, drafts=3, lanes=2, kv=kv))
    attention_launches = [launch for launch in ledger.launches if launch.kernel == f"attention_{kv}"]
    verify = [launch for launch in attention_launches if launch.part == "verify"]
    assert len(verify) == 16 and {launch.kv for launch in verify} == {2 * 1004 * position}
    assert [launch.kv for launch in attention_launches[:3]] == [2 * (1000 + t) * position for t in (4, 1, 1)]
    written = sum(launch.written for launch in ledger.launches if launch.kernel == f"qkv_rope_{kv}")
    assert written == position * (16 * 8 + 8 + 2 + 2)

    channels = (2 * sheet.heads.key + sheet.heads.value) * 128
    weights = DeltaWeights(torch.zeros(channels, 4), torch.zeros(sheet.heads.value), torch.zeros(sheet.heads.value))
    memory = DeltaState.empty(1, weights)
    assert memory.state.nbytes == sheet.heads.state_bytes
    assert memory.rows[0, 0, 0].nbytes == sheet.heads.row_bytes
    delta = next(launch for launch in ledger.launches if launch.family == "delta")
    assert delta.weights == weights.conv.nbytes + weights.a_log.nbytes + weights.dt_bias.nbytes
    assert delta.state == delta.written == 2 * (memory.state.nbytes + (3 + 4) * sheet.heads.row_bytes)


@pytest.mark.parametrize("group", [1, 4, 6, 8, 12])
def test_attention_passes_are_the_kernels(group: int) -> None:
    assert [passes(tokens, group) for tokens in range(1, 9)] == [
        attention._passes(tokens, group)[0] for tokens in range(1, 9)
    ]


def test_the_27b_has_its_published_sizes() -> None:
    """9.1 GB in the verification pass, 0.87 a draft, 0.64 of it the head; KV 35,904 bytes a token before the split."""
    sheet = sheet_at("qwen3.8-27b", 2, None)
    ledger = ledger_of(sheet, Shape(drafts=3))
    by_part: dict[str, float] = {}
    for launch in ledger.launches:
        by_part[launch.part] = by_part.get(launch.part, 0) + launch.weights
    assert by_part["verify"] == pytest.approx(9.1e9, rel=0.005)
    assert by_part["draft 2"] == pytest.approx(0.87e9, rel=0.02) and by_part["draft 2"] == by_part["draft 3"]
    whole = sheet_at("qwen3.8-27b", 1, None)
    assert 17 * kv_bytes(whole.heads.kv, whole.heads.dim, "int8") == 35_904
    assert 48 * sheet.heads.state_bytes == pytest.approx(75.5e6, rel=0.001)
    smaller = ledger_of(sheet.with_draft_head(131_072), Shape(drafts=3))
    assert ledger.read - smaller.read == 3 * (124_160 - 65_536) * (5120 + 4)
    plain = ledger_of(sheet, Shape())
    assert {launch.part for launch in plain.launches} == {"verify"}
    assert sum(launch.family == "collective" for launch in plain.launches) == 2 * 64 + 1
    assert not any(launch.family == "collective" for launch in ledger_of(whole, Shape(drafts=3)).launches)


def test_fused_launches_hold_the_same_bytes() -> None:
    ledger = ledger_of(sheet_at("qwen3.8-27b", 1, None), Shape(drafts=1))
    half = fused(ledger, 2)
    assert half.read == ledger.read and half.written == ledger.written
    counts = [sum(launch.family == "linear" for launch in one.launches) for one in (ledger, half)]
    assert counts == [4 * 64 + 5, 2 * 64 + 3]


def test_a_source_is_counted_as_it_is_and_as_it_would_become(ranks: Path) -> None:
    as_is, becomes = sheet_at(str(TINY), None, None), sheet_at(str(TINY), None, "v100")
    converted = sheet_at(str(ranks / "converted"), None, None)
    shape = Shape(context=10, drafts=3)
    assert ledger_of(becomes, shape).launches == ledger_of(converted, shape).launches
    assert ledger_of(as_is, shape).read > 1.5 * ledger_of(becomes, shape).read


def test_the_command_prints_sums_that_agree(ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ledger", str(ranks / "ranks" / "rank-1-of-2"), "--drafts", "3", "--context", "64"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tp"] == 2 and found["drafts"] == 3
    read = sum(launch["weights"] + launch["kv"] + launch["state"] for launch in found["launches"])
    assert read == found["bytes_read"]
    assert sum(family["bytes"] for family in found["families"].values()) == read + found["bytes_written"]
    assert main([*command, "--launches"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" MB read ") == len(found["launches"])
    assert f"{read / 1e9:,.3f} GB" in printed


@pytest.mark.parametrize(
    "words, message",
    [
        (["nothing-here"], "neither a directory"),
        (["qwen3.8-27b", "--drafts", "8"], "8 drafts"),
        (["qwen3.8-27b", "--lanes", "0"], "0 lanes"),
        (["qwen3.8-27b", "--context", "-1"], "a context of -1"),
        (["qwen3.8-27b", "--tp", "5"], "cannot be shared out over 5 ranks"),
        (["qwen3.8-27b", "--tp", "0"], "--tp 0"),
        (["qwen3.8-27b", "--drafts", "1", "--draft-head", "-4"], "--draft-head -4"),
        (["qwen3.8-27b", "--recipe", "nope"], "no recipe 'nope'"),
        (["missing.gguf"], "no such file"),
        (["missing.json"], "no such file"),
    ],
)
def test_bad_usage_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_cannot_be_is_refused(ranks: Path) -> None:
    with pytest.raises(InputError, match="a rank of 2"):
        sheet_at(str(ranks / "ranks" / "rank-0-of-2"), 4, None)
    with pytest.raises(InputError, match="already converted"):
        sheet_at(str(ranks / "converted"), 1, "v100")
    one: Ledger = ledger_of(sheet_at("tiny", 1, None), Shape())
    assert one.shape.rows == 1
