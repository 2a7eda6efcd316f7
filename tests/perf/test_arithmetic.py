"""`eval --arithmetic`: the plain model is the engine's model, its bfloat16 is transformers', and figures are what they say."""

import json
from pathlib import Path

import pytest
import torch

from duovolt.checkpoint.errors import CheckFailed
from duovolt.cli.main import main
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe
from duovolt.kernels.weights import Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight
from duovolt.perf.arithmetic import Depth, EngineReader, depths_of, judged, sharpened, study
from duovolt.perf.divergence import Predictor
from duovolt.perf.plain_model import BF16, FP32, PlainModel, slices
from duovolt.perf.together import Together
from duovolt.runtime.engine.cuda.loading import load_cuda_weights
from duovolt.runtime.engine.cuda.weights import CudaWeights
from duovolt.shard.split import shard

TINY = Path(__file__).parents[2] / "tiny" / "checkpoint"
TOKENS = [3024, *((17 * n * n + 5) % 3000 for n in range(60))]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights() -> CudaWeights:
    torch.set_num_threads(1)
    return load_cuda_weights(TINY, CPU)[0]


def test_the_plain_model_is_the_engines(weights: CudaWeights) -> None:
    """In two parts, so that caches and states carry over; nothing is rounded."""
    model = PlainModel(weights, FP32, len(TOKENS))
    hidden = torch.cat((model.read(TOKENS[:23]), model.read(TOKENS[23:])))
    predictor = Predictor(TINY, len(TOKENS))
    found = torch.log_softmax(model.logits(hidden)[:, : predictor.sampleable].double(), -1)
    assert float((found - predictor.log_probabilities(TOKENS)).abs().max()) < 1e-4


def test_bfloat16_is_as_far_off_as_in_transformers(weights: CudaWeights) -> None:
    """Not the same bits, as sums run in other orders: the same loss, within what 60 tokens tell."""
    from transformers import AutoModelForImageTextToText

    theirs = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        rows = theirs(input_ids=torch.tensor([TOKENS])).logits[0].float()
    plain, ours = (PlainModel(weights, precision, len(TOKENS)) for precision in (FP32, BF16))
    exact = torch.log_softmax(plain.logits(plain.read(TOKENS)).double(), -1)
    losses = []
    for other in (ours.logits(ours.read(TOKENS)), rows):
        losses.append(float((exact.exp() * (exact - torch.log_softmax(other.double(), -1))).sum(-1).mean()))
    assert losses[1] / 3 < losses[0] < 3 * losses[1] and losses[0] > 1e-5


@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "fp8 blocks", "half"])
def test_slices_of_a_matrix_are_the_matrix(kind: str) -> None:
    torch.manual_seed(1)
    words = torch.randint(0, 120, (5, 8, 32, 16), dtype=torch.uint8)
    weight = {
        "nvfp4": lambda: Nvfp4Weight(words[..., :8].contiguous(), words[..., 0].contiguous(), torch.rand(1)),
        "fp8": lambda: Fp8Weight(words, torch.rand(160)),
        "fp8 blocks": lambda: Fp8BlockWeight(words, torch.rand(3, 1), (64, 128)),
        "half": lambda: HalfWeight.of(torch.randn(150, 128).half()),
    }[kind]()
    parts = list(slices(weight, values=64 * 128))
    whole = weight.values() * (weight.scale if weight.scale.numel() == 1 else weight.scale[:, None])
    joined = [part.values() * (part.scale if part.scale.numel() == 1 else part.scale[:, None]) for _, part in parts]
    assert [first for first, _ in parts] == [0, 64, 128]
    assert torch.equal(torch.cat(joined), whole)


def test_decode_rounds_predict_what_chunks_do(weights: CudaWeights) -> None:
    """The engine's two ways to read are close to one another, and far closer to fp32 than bf16 is."""
    found = study(
        weights, TOKENS[:58], [Depth(50, 7), Depth(57, 7, True)], ("fp32", "bf16", "fp16", "int8"), 3032, 16, print
    )
    assert [str(own.depth) for own in found.found] == ["43..49", "50..56 decode"]
    for own in found.found:
        loss = {b: pair.mean for (a, b), pair in own.pairs.items() if a == "fp32"}
        assert 0 < loss["fp16"] < loss["int8"] < loss["bf16"] < 0.1
        assert all(pair.tokens == 7 and pair.mean <= pair.largest for pair in own.pairs.values())
    assert set(found.found[0].pairs) == {("fp32", x) for x in ("bf16", "fp16", "int8")} | {
        ("bf16", "fp16"),
        ("fp16", "int8"),
    }
    assert found.overflows == {"fp16": 0, "int8": 0}
    chunks, rounds = EngineReader(weights, TOKENS, True), EngineReader(weights, TOKENS, True)
    hidden = chunks.read(TOKENS[:40])
    rounds.read(TOKENS[:30])
    assert float((chunks.logits(hidden[30:]) - rounds.decode(TOKENS[30:40])).abs().max()) < 0.05


def test_the_figures_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]), torch.tensor([[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]])
    logits = {"a": (p + 1e-30).log(), "b": (q + 1e-30).log()}
    found = judged(Depth(2, 2), logits, [1, 0], CPU)
    assert found.entropy == pytest.approx(1.5 * 0.6931472 / 2)
    assert found.loss == pytest.approx({"a": 1.3862944 / 2, "b": 0.6931472 / 2})
    pair = found.pairs["a", "b"]
    assert pair.mean == pytest.approx((0.5 - 0.25) * 0.6931472 / 2) and pair.agreement == 0.5
    with pytest.raises(CheckFailed, match=r"b: predictions at 0\.\.1 are not finite"):
        judged(Depth(2, 2), logits | {"b": torch.full((2, 3), torch.nan)}, [1, 0], CPU)


def test_depths_go_down_by_quarters() -> None:
    found = depths_of(131_072, 64)
    assert [depth.end for depth in found] == [128, 512, 2048, 8192, 32768, 131072, 131136]
    assert found[-1].decoded and found[0].first == 64
    assert [depth.end for depth in depths_of(100, 64)] == [100, 164]


def test_random_weights_are_made_sharp(weights: CudaWeights) -> None:
    sharp = sharpened(weights, head=2.0, query=5.0)
    rows = sharp.head.values() * (sharp.head.scale if sharp.head.scale.numel() == 1 else sharp.head.scale[:, None])
    logits = torch.randn(64, rows.shape[1], generator=torch.Generator().manual_seed(1)) @ rows.t()
    assert float(logits.std()) == pytest.approx(2.0, rel=0.05)
    norms = [layer.mixer.query_norm for layer in sharp.layers if hasattr(layer.mixer, "query_norm")]
    assert len(norms) == 2 and all(bool((norm == 4.0).all()) for norm in norms)


def test_the_command(capsys: pytest.CaptureFixture[str], weights: CudaWeights) -> None:
    words = ["eval", "--random", "tiny", "--layers", "4", "--arithmetic", "--device", "cpu", "--context", "40"]
    assert main([*words, "--positions", "4", "--paths", "fp32", "int8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [own["depth"]["end"] for own in found["found"]] == [10, 40, 44] and found["code"] == {}
    assert set(found["found"][0]["pairs"]) == {"fp32 int8"} and found["tokens"] == 45


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model converted, and its ranks."""
    folder = tmp_path_factory.mktemp("split")
    convert(TINY, folder / "converted", load_recipe("v100"), 1, lambda count: None)
    for size in (1, 2):
        shard(folder / "converted", folder / f"ranks-{size}", size)
    return folder


def test_two_ranks_lose_what_their_sums_lose(capsys: pytest.CaptureFixture[str], split: Path) -> None:
    """Parts of a sum are rounded to fp16 on their way: other digits than one rank's, and far nearer to fp32 than bf16."""
    words = ["eval", str(split / "converted"), "--arithmetic", "--device", "cpu", "--context", "12", "--positions", "6"]
    assert main([*words, "--ranks", str(split / "ranks-2"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["paths"] == ["fp32", "bf16", "fp16", "fp16-2"] and found["overflows"] == {"fp16": 0, "fp16-2": 0}
    for own in found["found"]:
        loss = {pair: own["pairs"][pair]["mean"] for pair in ("fp32 bf16", "fp32 fp16-2", "fp16 fp16-2")}
        assert 0 < loss["fp32 fp16-2"] < loss["fp32 bf16"] / 10 and 0 < loss["fp16 fp16-2"] < loss["fp32 bf16"] / 10


def test_ranks_in_one_process_meet_as_the_mailbox_has_them_and_a_fault_frees_both() -> None:
    together = Together(CPU)
    parts = [torch.randn(3, 8).half(), torch.randn(3, 8).half()]

    def work(rank: int) -> torch.Tensor:
        sums, sides = torch.empty(3, 8), torch.empty(3, 16)
        for _ in range(20):
            together.links[rank].reduce(parts[rank], sums)
            together.links[rank].gather(parts[rank].float(), sides)
        return torch.cat((sums, sides), 1)

    for found in together.both(work):
        assert torch.equal(
            found, torch.cat((parts[0].float() + parts[1].float(), parts[0].float(), parts[1].float()), 1)
        )

    def fail(rank: int) -> None:
        if rank == 1:
            raise CheckFailed("here")
        together.links[rank].reduce(parts[rank], torch.empty(3, 8))

    with pytest.raises(CheckFailed, match="here"):
        together.both(fail)
    together.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --ranks"),
        (["--ranks", "ranks-1"], "1 rank, expected two"),
        (["--ranks", "nowhere"], "no such directory"),
        (["--ranks", "ranks-2", "--paths", "fp32", "fp16"], "for the paths fp16-2 and int8-2"),
    ],
)
def test_ranks_that_do_not_belong(
    split: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(split)
    assert main(["eval", "converted", "--arithmetic", "--device", "cpu", "--paths", "fp32", "fp16-2", *words]) == 2
    assert said in (err := capsys.readouterr().err) and "Traceback" not in err
    if not words:
        assert (
            main(["eval", str(TINY), "--arithmetic", "--device", "cpu", "--ranks", "ranks-2", "--context", "64"]) == 2
        )
        assert "is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([TINY], 3, "no usable card"),
        ([TINY, "--device", "cpu", "--context", "30000"], 2, "the text has"),
        ([TINY, "--device", "cpu", "--context", "3"], 2, "at least --positions"),
        ([TINY, "--device", "cpu", "--paths", "fp16"], 2, "two different ones"),
        ([TINY, "--device", "cpu", "--arch", "compute_70"], 2, "no kernel runs"),
        (["--random", "narrow", "--device", "cpu"], 2, "no kernels for this model"),
        ([TINY, "--random", "tiny"], 2, "in place of a directory"),
        ([TINY, "--against", TINY], 2, "--against has no effect here"),
        ([], 2, "one directory, or --random"),
    ],
)
def test_what_cannot_be_measured(words: list[object], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if code == 3 and torch.cuda.is_available():
        pytest.skip("there is a card")
    assert main(["eval", "--arithmetic", *map(str, words)]) == code
    assert said in (err := capsys.readouterr().err) and "Traceback" not in err
