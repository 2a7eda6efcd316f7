"""Pictures in prompts against transformers' whole model, on the bundled checkpoint."""

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duovolt.cli.main import main
from duovolt.runtime.engine import vision
from duovolt.runtime.engine.cache import Cache
from duovolt.runtime.engine.cuda.loading import load_cuda_weights
from duovolt.runtime.engine.engine import Engine
from duovolt.runtime.engine.model import Batch, Model, Segment
from duovolt.runtime.engine.reference import ReferenceExecutor
from duovolt.runtime.engine.sources import open_source
from duovolt.runtime.engine.vision import PromptImages, VisionTower
from duovolt.runtime.engine.weights import load_weights
from duovolt.runtime.images.placing import Pixels, Placed, place
from duovolt.runtime.images.processor import ImageProcessor
from duovolt.runtime.messages import GenerateRequest, ImageInput, SamplingParams
from duovolt.runtime.parallel.base import Collective, SoloCollective

TINY = Path(__file__).parents[2] / "tiny" / "checkpoint"
PAD, VIDEO, START, END = 3029, 3030, 3027, 3028
SIZES: dict[str, list[tuple[int, ...]]] = {
    "one": [(64, 96)],
    "two": [(96, 64), (160, 128)],
    "a picture and a video": [(64, 96), (3, 64, 32)],  # three groups of two frames
}
CONTEXT = 256
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PLACES = ["cpu", pytest.param("native", marks=needs_gpu), pytest.param("portable", marks=needs_gpu)]


@cache
def tiny() -> Any:
    return open_source(TINY)


def tower(weights: Any) -> VisionTower:
    return VisionTower(weights.vision, ImageProcessor.read(TINY, tiny().config.vision))


def prompt(sizes: list[tuple[int, ...]], seed: int = 5) -> Placed:
    """Words, then each picture, or each group of a video's frames (groups, height, width), with words behind it."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 3000, 9).tolist()
    shown: dict[int, list[Pixels]] = {PAD: [], VIDEO: []}
    for *groups, height, width in sizes:
        pad, frames = (VIDEO, 2) if groups else (PAD, 1)
        for _ in range(groups[0] if groups else 1):
            ids += [START, pad, END, *generator.integers(0, 3000, 7).tolist()]
            data = generator.integers(0, 256, 3 * frames * height * width, dtype=np.uint8).tobytes()
            shown[pad].append(Pixels(height, width, data, frames))
    return place(ids, shown, 32)


def patches(placed: Placed, processor: ImageProcessor) -> dict[str, Tensor]:
    """As transformers takes them: pictures, and every video's groups as one."""
    found = {}
    for name, grid, of_video in (
        ("pixel_values", "image_grid_thw", False),
        ("pixel_values_videos", "video_grid_thw", True),
    ):
        some = [image for image in placed.images if (image.frames > 1) == of_video]
        if some:
            shaped = [np.frombuffer(i.pixels, np.uint8).reshape(i.frames, i.height, i.width, 3) for i in some]
            found[name] = torch.from_numpy(np.concatenate([processor.patches(one) for one in shaped]))
            grids = [[1, i.height // 16, i.width // 16] for i in some]
            found[grid] = torch.tensor([[len(some), *grids[0][1:]]] if of_video else grids)
    return found


@cache
def peer() -> Any:
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def peer_answer(placed: Placed, count: int) -> tuple[Tensor, list[int]]:
    """Logits of the prompt [T, V], and `count` greedy tokens, the whole sequence read anew for each."""
    shown = patches(placed, ImageProcessor.read(TINY, tiny().config.vision))
    ids, first = list(placed.ids), None
    for _ in range(count + 1):
        tokens = torch.tensor([ids])
        logits = peer()(
            input_ids=tokens, **shown, mm_token_type_ids=(tokens == PAD).int() + 2 * (tokens == VIDEO).int(),
            attention_mask=torch.ones_like(tokens), use_cache=False,
        ).logits[0]  # fmt: skip
        first = logits if first is None else first
        ids.append(int(logits[-1, :3031].argmax()))
    assert first is not None
    return first, ids[len(placed.ids) : -1]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_tower_and_logits(name: str) -> None:
    placed, weights = prompt(SIZES[name]), load_weights(tiny())
    reader, model = tower(weights), Model(weights, SoloCollective(), CONTEXT)
    shown = patches(placed, reader.processor)
    wanted = [peer().model.visual(shown["pixel_values"], grid_thw=shown["image_grid_thw"]).pooler_output]
    if "pixel_values_videos" in shown:
        videos = peer().model.visual(shown["pixel_values_videos"], grid_thw=shown["video_grid_thw"])
        wanted.append(videos.pooler_output)
    found = torch.cat([reader.embed(image) for image in placed.images])
    assert relative(found, torch.cat(wanted)) < 1e-5
    count = len(placed.ids)
    slots = Cache.for_one(weights, count)
    rows = PromptImages(placed.images, reader).rows(0, count)
    rope = torch.tensor(placed.rope_positions)
    batch = Batch(torch.tensor(placed.ids), [Segment(0, 0, count)], rope, by_rows=False, images=rows)
    assert relative(model.logits(model.forward(batch, slots)), peer_answer(placed, 0)[0]) < 1e-3


def engine_of(source: Any, collective: Collective, **settings: Any) -> Engine:
    weights = load_weights(source)
    reader, model = tower(weights), Model(weights, collective, CONTEXT)
    shared = {"lanes": settings.pop("lanes", 1), "n_sampleable": 3031, "max_context": CONTEXT}
    own = {name: settings.pop(name) for name in ("drafts", "pages") if name in settings}
    executor = ReferenceExecutor(model, **{"drafts": 0, **own}, tower=reader, **shared)
    return Engine(executor, processor=reader.processor, image_token=PAD, video_token=VIDEO, **shared, **settings)


def request(placed: Placed, number: int = 1, **fields: Any) -> GenerateRequest:
    given = {"images": placed.images, "rope_positions": placed.rope_positions} | fields
    sampling = given.pop("sampling", SamplingParams(temperature=0.0))
    return GenerateRequest(number, placed.ids, 16, [], False, sampling, **given)


@pytest.mark.parametrize("name", SIZES)
def test_greedy_answers(tools: Any, name: str) -> None:
    """In chunks that cut pictures, with and without drafts, alone and beside another lane."""
    placed = prompt(SIZES[name])
    wanted = peer_answer(placed, 16)[1]
    for settings in ({"prefill_chunk": 512}, {"prefill_chunk": 7}, {"prefill_chunk": 5, "drafts": 3}):
        run = tools.drive(engine_of(tiny(), SoloCollective(), **settings), request(placed))
        assert run.tokens[1] == wanted, settings
    other = prompt([(64, 64)], seed=8)
    run = tools.drive(
        engine_of(tiny(), SoloCollective(), lanes=2, drafts=2, prefill_chunk=9), request(placed), request(other, 2)
    )
    assert run.tokens[1] == wanted


@pytest.mark.parametrize("chunk", [13, 512])
@pytest.mark.parametrize("name", ["two", "a picture and a video"])
@pytest.mark.parametrize("place", PLACES)
def test_the_cuda_engine_reads_pictures_and_videos(tools: Any, place: str, name: str, chunk: int) -> None:
    """On the kernels' references, or on a card with its own build and with what a V100 gets; in chunks that cut pictures
    and groups of frames: the reference engine's tokens and, nearly, its scores."""
    from duovolt.kernels.module import PORTABLE, forced_arch
    from duovolt.runtime.engine.cuda.executor import CudaExecutor
    from duovolt.runtime.parallel.device import SoloDevice

    placed = prompt(SIZES[name])
    ask = request(placed, sampling=SamplingParams(temperature=0.0, logprobs=1))
    shared = {"lanes": 1, "n_sampleable": 3031, "max_context": CONTEXT}
    with forced_arch(PORTABLE) if place == "portable" else contextlib.nullcontext():
        weights, _ = load_cuda_weights(TINY, torch.device("cpu" if place == "cpu" else "cuda:0"))
        reader = tower(weights)
        executor = CudaExecutor(weights, SoloDevice(), drafts=2, int8=False, tower=reader, **shared)
        tokens = {"image_token": PAD, "video_token": VIDEO}
        run = tools.drive(Engine(executor, processor=reader.processor, prefill_chunk=chunk, **tokens, **shared), ask)
    wanted = tools.drive(engine_of(tiny(), SoloCollective(), prefill_chunk=chunk), ask)
    assert run.tokens[1] == wanted.tokens[1]
    pairs = zip(
        *([entry.logprob for event in one.events[1] for entry in event.logprobs] for one in (run, wanted)), strict=True
    )
    apart = max(abs(a - b) for a, b in pairs)
    print(f"{place}, {name}, chunks of {chunk}: log probabilities apart by {apart:.1e} at most")
    assert apart < 0.02


def cuda_engine_of(lanes: int, **settings: Any) -> Engine:
    """The CUDA executor on the kernels' references."""
    from duovolt.runtime.engine.cuda.executor import CudaExecutor
    from duovolt.runtime.parallel.device import SoloDevice

    weights, _ = load_cuda_weights(TINY, torch.device("cpu"))
    reader, shared = tower(weights), {"lanes": lanes, "n_sampleable": 3031, "max_context": CONTEXT}
    executor = CudaExecutor(weights, SoloDevice(), drafts=2, int8=False, tower=reader, **shared)
    return Engine(
        executor,
        processor=reader.processor,
        image_token=PAD,
        video_token=VIDEO,
        prefill_chunk=512,
        **shared,
        **settings,
    )


def beside_pictures(
    tools: Any, kind: str, placed: Placed, cancelled: bool = False
) -> tuple[list[tuple[str, int, int]], Any, Engine]:
    """An answer in the making, then a prompt with pictures and one of words, which comes while the first picture is looked at:
    of each step its kind and the tokens read of both prompts; the run; the engine."""
    engine = cuda_engine_of(3) if kind == "cuda" else engine_of(tiny(), SoloCollective(), lanes=3, prefill_chunk=512)
    steps: list[tuple[str, int, int]] = []
    asks = [
        GenerateRequest(n, [5] * 20, most, [], False, SamplingParams(temperature=0.0)) for n, most in ((1, 60), (3, 4))
    ]

    def after(engine: Engine) -> None:
        read = {lane.request.request_id: lane.read for lane in engine.running}
        steps.append(("", read.get(2, -1), read.get(3, -1)))
        if len(steps) == 2:
            engine.add(request(placed, 2))
        if len(steps) == 4:
            engine.add(asks[1])
        if cancelled and len(steps) == 9:
            engine.cancel(2)

    run = tools.drive(engine, asks[0], after_step=after)
    return [(record.kind, *step[1:]) for record, step in zip(run.records, steps, strict=True)], run, engine


@pytest.mark.parametrize("kind", ["reference", "cuda"])
def test_a_picture_lets_rounds_run_between_its_parts(tools: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is: and nothing of another prompt is read meanwhile, whose memory it takes."""
    placed = prompt(SIZES["two"])
    plain = beside_pictures(tools, kind, placed)[1]
    monkeypatch.setattr(vision, "PRODUCTS_A_LOOK", 1)
    steps, run, _ = beside_pictures(tools, kind, placed)
    assert run.tokens == plain.tokens, "the same bits, however many parts"
    first = next(n for n, step in enumerate(steps) if step[1] >= 0)
    read = next(n for n, step in enumerate(steps) if step[1] > 0)
    parts = 1 + 2 * tiny().config.vision.depth  # patches, then attention and MLP of each layer
    assert [step[0] for step in steps[first:read]] == ["prefill", "round"] * (2 * parts)
    assert max(step[2] for step in steps[first : read + 1]) == 0, "it has its lane and waits"
    assert run.events[3][-1].finish_reason == "length"


@pytest.mark.parametrize("kind", ["reference", "cuda"])
def test_a_client_that_leaves_while_its_picture_is_looked_at_frees_its_lane(
    tools: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A01 in the middle of a picture: the others go on in the next step."""
    monkeypatch.setattr(vision, "PRODUCTS_A_LOOK", 1)
    steps, run, engine = beside_pictures(tools, kind, prompt(SIZES["two"]), cancelled=True)
    assert run.events[2][-1].finish_reason == "cancelled" and len(run.tokens[3]) == 4 and len(run.tokens[1]) == 60
    assert max(step[1] for step in steps) == 0 and max(step[2] for step in steps) == 20
    assert engine.free_pages == engine.pages and engine.running == []


QUANTISED = """name = "quantised-tower"
layout = "v100"
max_shard_bytes = 2147483648
[[rules]]
group = "vision"
names = ["*.attn.qkv.weight", "*.attn.proj.weight", "*.mlp.linear_fc1.weight", "*.merger.linear_fc2.weight"]
encoding = "fp8_e4m3"
[[rules]]
group = "vision"
names = ["*.mlp.linear_fc2.weight", "*.merger.linear_fc1.weight", "*.pos_embed.weight"]
encoding = "nvfp4"
"""


@pytest.mark.parametrize("place", PLACES[:2])
def test_a_quantised_vision_tower_is_read_by_the_cuda_engine(tools: Any, tmp_path: Path, place: str) -> None:
    """Releases quantise it, too. Kept as it is stored, decoded for each picture: the embeddings of the reference engine, which
    decodes it once."""
    recipe = tmp_path / "quantised.toml"
    recipe.write_text(QUANTISED)
    assert main(["convert", str(TINY), str(tmp_path / "made"), "--recipe", str(recipe), "--quiet"]) == 0
    device = torch.device("cpu" if place == "cpu" else "cuda:0")
    weights, _ = load_cuda_weights(tmp_path / "made", device)
    assert weights.vision is not None
    kinds = [type(part.weight).__name__ for part in (weights.vision.blocks[0].fc1, weights.vision.blocks[0].fc2)]
    assert kinds == ["Fp8Weight", "Nvfp4Weight"]
    assert weights.vision.blocks[0].fc1.weight.nbytes < 4 * weights.vision.blocks[0].fc1.plain.nbytes // 10
    placed, plain = prompt(SIZES["two"]), tower(load_weights(open_source(tmp_path / "made")))
    for image in placed.images:
        wanted = plain.embed(image)
        assert relative(tower(weights).embed(image).cpu(), wanted) < (1e-6 if place == "cpu" else 1e-5)
        assert relative(tower(load_weights(tiny())).embed(image), wanted) > 1e-3  # it is another tower


def test_two_ranks_answer_as_one(tools: Any) -> None:
    placed = prompt(SIZES["a picture and a video"])
    alone = tools.drive(engine_of(tiny(), SoloCollective(), prefill_chunk=16), request(placed))

    def work(collective: Collective) -> Any:
        source = tools.cut(tiny(), 2, collective.rank)
        return tools.drive(engine_of(source, collective, drafts=3, prefill_chunk=16), request(placed))

    first, second = tools.ranks(2, work)
    assert first.records == second.records
    assert first.tokens == second.tokens == alone.tokens


def test_two_ranks_agree_on_every_part_of_a_picture(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an answer beside it, kept prefixes, and a request that is cancelled while its picture is looked at."""
    placed = prompt(SIZES["two"])
    plain = tools.drive(engine_of(tiny(), SoloCollective(), prefill_chunk=512), request(placed, 3))
    monkeypatch.setattr(vision, "PRODUCTS_A_LOOK", 1)

    def work(collective: Collective) -> Any:
        settings = {"lanes": 2, "drafts": 3, "prefill_chunk": 512, "prefix_bytes": 1 << 30, "pages": 40}
        engine = engine_of(tools.cut(tiny(), 2, collective.rank), collective, **settings)
        words = GenerateRequest(1, [5] * 20, 60, [], False, SamplingParams(temperature=0.0))
        steps = 0

        def after(engine: Engine) -> None:
            nonlocal steps
            steps += 1
            if steps == 3:
                engine.add(request(placed, 2))
            if steps == 7:
                engine.cancel(2)
                engine.add(request(placed, 3))

        run = tools.drive(engine, words, after_step=after)
        return run, engine.free_pages + engine.idle_pages == engine.pages

    (first, whole), (second, other) = tools.ranks(2, work)
    assert first.records == second.records and first.tokens == second.tokens and whole and other
    assert first.events[2][-1].finish_reason == "cancelled" and first.tokens[3] == plain.tokens[3]
    assert len([record for record in first.records if record.kind == "prefill"]) > 2 * tiny().config.vision.depth


def test_another_picture_shows_in_the_lockstep_record_and_in_the_states(tools: Any) -> None:
    placed = prompt(SIZES["one"])
    image = placed.images[0]
    changed = bytes([image.pixels[0] ^ 1]) + image.pixels[1:]
    other = Placed(placed.ids, [ImageInput(image.start, image.height, image.width, changed)], placed.rope_positions)
    runs = [tools.drive(engine_of(tiny(), SoloCollective()), request(one)) for one in (placed, other, placed)]
    assert runs[0].records[0] != runs[1].records[0], "one bit of one pixel"
    assert runs[0].records == runs[2].records


def test_a_picture_is_found_again_and_another_is_not(tools: Any) -> None:
    placed = prompt([(160, 128)] * 4)
    first = placed.images[1]
    changed = [*placed.images]
    changed[1] = ImageInput(first.start, first.height, first.width, bytes([first.pixels[0] ^ 1]) + first.pixels[1:])
    edge = placed.images[3].start + 7  # in the middle of the last picture
    engine = engine_of(tiny(), SoloCollective(), drafts=2, prefill_chunk=32, prefix_bytes=1 << 30, pages=20)
    for number, (one, found) in enumerate(
        [
            (placed, 0),
            (placed, len(placed.ids)),
            (Placed(placed.ids, changed, placed.rope_positions), 0),
            (Placed(placed.ids[:-7], placed.images, [row[:-7] for row in placed.rope_positions or []]), edge),
        ]
    ):
        asked = request(one, number, checkpoints=[edge])
        run = tools.drive(engine, asked)
        assert run.events[number][0].cached_tokens == found
        plain = tools.drive(engine_of(tiny(), SoloCollective()), asked)
        assert run.tokens[number] == plain.tokens[number]


def test_the_draft_layer_sees_the_picture(tools: Any) -> None:
    """Its keys come from the same embeddings: a different picture, other keys, whatever the chunks."""
    placed, found = prompt(SIZES["one"]), []
    for chunk in (512, 6):
        engine = engine_of(tiny(), SoloCollective(), drafts=2, prefill_chunk=chunk)
        engine.add(request(placed))
        while engine.executor.cache.mtp_lengths[0] < len(placed.ids) - 1:
            engine.step()
        pages = engine.executor.cache.mtp_kv.table(0)
        found.append(engine.executor.cache.mtp_kv.keys[0][pages].flatten(0, 1)[: len(placed.ids) - 1].clone())
    assert relative(found[1], found[0]) < 1e-4


@pytest.mark.parametrize(
    ("image", "fields", "words"),
    [
        ({"start": 9}, {}, "not all 3029"),
        ({"start": 99}, {}, "expected 0 to"),
        ({"start": -1}, {}, "expected 0 to"),
        ({"height": 33}, {}, "not whole tokens"),
        ({"height": 0}, {}, "not whole tokens"),
        ({"frames": 2}, {}, "has 18432 bytes, expected 36864"),
        ({"frames": 2, "pixels": bytes(36864)}, {}, "not all 3030"),
        ({"frames": 3, "pixels": bytes(55296)}, {}, "3 frames: a picture has one, a video's group 2"),
        ({"height": 32}, {}, "has 18432 bytes, expected 9216"),
        ({"height": 1024, "width": 1024, "pixels": bytes(3 << 20)}, {}, "at most 262144 pixels"),
        ({}, {"rope_positions": None}, "no rope_positions"),
    ],
)
def test_requests_that_make_no_sense(tools: Any, image: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    placed = prompt(SIZES["one"])
    first = placed.images[0]
    whole = {"start": first.start, "height": first.height, "width": first.width, "pixels": first.pixels} | image
    run = tools.drive(
        engine_of(tiny(), SoloCollective()), request(placed, **({"images": [ImageInput(**whole)]} | fields))
    )
    assert run.finish(1) == "error" and words in run.events[1][-1].error


def test_a_picture_must_lie_in_the_prompt_whole(tools: Any) -> None:
    placed = prompt(SIZES["one"])
    first = placed.images[0]
    end = first.start + first.height * first.width // 32**2
    for length, whole in ((end - 1, False), (end, True)):
        rope = [row[:length] for row in placed.rope_positions]
        short = request(Placed(placed.ids[:length], [first], rope))
        run = tools.drive(engine_of(tiny(), SoloCollective()), short)
        assert (run.finish(1) != "error") == whole, run.events[1][-1].error
        assert whole or f"to {end - 1}, expected 0 to {end - 2}" in run.events[1][-1].error


def test_a_model_without_a_tower_says_so(tools: Any) -> None:
    placed = prompt(SIZES["one"])
    engine = tools.engine(tools.source(seed=1, vocab_size=3072))
    run = tools.drive(engine, request(placed))
    assert "no vision tower" in run.events[1][-1].error


def test_a_tower_of_stored_words_gives_the_bits_of_a_widened_one() -> None:
    """The tower of a card stays bfloat16: half the memory, the same values."""
    from duovolt.runtime.engine.cuda.loading import load_cuda_weights

    stored, _ = load_cuda_weights(TINY, torch.device("cpu"))
    assert stored.vision is not None and stored.vision.blocks[0].qkv.weight.dtype == torch.bfloat16
    image = prompt(SIZES["one"]).images[0]
    assert torch.equal(tower(stored).embed(image), tower(load_weights(tiny())).embed(image))


def test_attention_in_blocks_is_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from duovolt.kernels.reference import vision

    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(50, 3, 8, generator=generator) for _ in range(3))
    whole = vision.attend_all(query, key, value)
    monkeypatch.setattr(vision, "SCORES_BYTES", 7 * 4 * 3 * 50)  # blocks of seven queries, the last one shorter
    torch.testing.assert_close(vision.attend_all(query, key, value), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_attention_with_operands_in_half_is_the_attention(size: float) -> None:
    """What a card does: whatever the size of queries, keys and values, fp16 holds what counts. Heads of twelve are padded."""
    from duovolt.kernels.reference import vision

    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(60, 2, 12, generator=generator) for _ in range(3))
    whole = vision.attend_all(query, key, value) * size
    got = vision.attend_all_half(query * size, key / size, value * size)
    assert float((got - whole).norm() / whole.norm()) < 1e-3
    broken = vision.attend_all_half(query, key.index_fill(0, torch.tensor([5]), float("nan")), value)
    assert bool(broken.isnan().all())


def test_a_large_picture_goes_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few heads and a few rows at a time: the same embeddings, but for the order of sums."""
    from duovolt.runtime.engine import vision

    weights, image = load_weights(tiny()), prompt(SIZES["one"]).images[0]
    whole = tower(weights).embed(image)
    patches, hidden = 64 * 96 // 16**2, weights.vision.positions.shape[1]
    monkeypatch.setattr(vision, "PROJECTION_BYTES", 12 * patches * hidden // weights.vision.heads)  # one head at a time
    monkeypatch.setattr(vision, "ROWS_AT_ONCE", 7)
    torch.testing.assert_close(tower(weights).embed(image), whole, rtol=1e-4, atol=1e-5)


def test_pixels_become_patches_a_strip_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large picture, whose patches are seconds of the host's work: the same embeddings, and a part each."""
    placed = prompt([(160, 128)])
    reader = tower(load_weights(tiny()))
    whole, parts = reader.embed(placed.images[0]), list(reader.look(placed.images[0]))
    monkeypatch.setattr(vision, "ROWS_AT_ONCE", 20)  # of ten rows of eight patches
    strips = list(reader.look(placed.images[0]))
    assert parts[0] == 80 * vision.PRODUCTS_A_PATCH and strips[:5] == [16 * vision.PRODUCTS_A_PATCH] * 5
    assert strips[5:] == parts[1:]
    torch.testing.assert_close(reader.embed(placed.images[0]), whole, rtol=1e-4, atol=1e-5)
