"""Which requests can be served at all, and how long their answers may get."""

from ...checkpoint.errors import InputError
from ..images.processor import ImageProcessor
from ..messages import GenerateRequest, ImageInput
from .pages import pages_for
from .sampling import fault_of
from .speculation import MAX_DRAFTS

MAX_CHECKPOINTS = 16


def check_settings(max_context: int, lanes: int) -> None:
    """Raises InputError for settings that no engine or executor works with."""
    check_range("context", max_context, 2, 1 << 24)
    check_range("lanes", lanes, 1, 4)


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raises InputError for a setting out of its range."""
    if not least <= value <= most:
        raise InputError(f"engine: {name} is {value}, expected {least} to {most}.")


def check_forced(rounds: object, n_sampleable: int) -> None:
    """`rounds` may come straight from a file: it must be a list of lists of ids. Raises InputError."""
    if not isinstance(rounds, list):
        raise InputError("forced drafts: expected a list of lists of token ids, one list a round.")
    for number, row in enumerate(rounds):
        if (
            not isinstance(row, list)
            or len(row) > MAX_DRAFTS
            or any(type(token) is not int or not 0 <= token < n_sampleable for token in row)
        ):
            raise InputError(
                f"forced drafts: round {number} is {str(row)[:60]}, expected at most {MAX_DRAFTS} token ids below "
                f"{n_sampleable}."
            )


def answer_limit(request: GenerateRequest, max_context: int) -> int:
    """Tokens the answer may have: max_tokens, or what the context leaves."""
    return min(request.max_tokens, max_context - len(request.prompt))


def fault_of_request(request: GenerateRequest, max_context: int, vocabulary: int, pages: int) -> str | None:
    """Why a request cannot be served, None if it can. `pages`: the size of the pool."""
    prompt = request.prompt
    if not 0 <= request.request_id < 1 << 64:
        return f"request id {request.request_id} is not an unsigned 64-bit number."
    if not prompt:
        return "the prompt is empty: at least one token is needed."
    if bad := [token for token in prompt if not 0 <= token < vocabulary]:
        return f"the prompt holds token {bad[0]}; the model knows ids 0 to {vocabulary - 1}."
    if request.max_tokens < 0:
        return f"max_tokens is {request.max_tokens}, expected 0 or more."
    if len(prompt) + min(request.max_tokens, 1) > max_context:
        return f"the prompt has {len(prompt)} tokens; the context holds {max_context}, prompt and answer together."
    needed = pages_for(len(prompt) + answer_limit(request, max_context))
    if needed > pages:
        return f"the request needs {needed} pages of keys and values, the server has {pages}. Lower max_tokens."
    if request.echo_logprobs and not request.sampling.logprobs:
        return "echo_logprobs needs sampling.logprobs of 1 or more."
    if request.rope_positions is not None and (fault := _rope_fault(request.rope_positions, len(prompt))):
        return fault
    if len(request.checkpoints) > MAX_CHECKPOINTS or any(not 0 < at <= len(prompt) for at in request.checkpoints):
        return f"checkpoints: expected at most {MAX_CHECKPOINTS} lengths of 1 to {len(prompt)} tokens."
    if request.grammar is not None and (fault := _grammar_fault(request, vocabulary)):
        return fault
    return fault_of(request.sampling, vocabulary)


def fault_of_images(
    request: GenerateRequest, processor: ImageProcessor | None, image_token: int | None, video_token: int | None
) -> str | None:
    """Why the pictures of a request, and the frames of its videos, cannot be read, None if they can."""
    if not request.images:
        return None
    if processor is None:
        return "the request holds pictures; this model has no vision tower."
    if request.rope_positions is None:
        return "the request holds pictures but no rope_positions."
    end = 0
    for number, image in enumerate(request.images):
        if fault := _picture_fault(image, processor):
            return f"picture {number}: {fault}"
        begin, end = end, image.start + processor.tokens(image.height, image.width)
        if not begin <= image.start or end > len(request.prompt):
            return f"picture {number} has tokens {image.start} to {end - 1}, expected {begin} to {len(request.prompt) - 1}."
        wanted = image_token if image.frames == 1 else video_token
        if any(token != wanted for token in request.prompt[image.start : end]):
            return f"picture {number}: tokens {image.start} to {end - 1} are not all {wanted}."
    return None


def _grammar_fault(request: GenerateRequest, vocabulary: int) -> str | None:
    assert request.grammar is not None
    ends = request.grammar.ends
    if not ends or any(not 0 <= token < vocabulary for token in ends):
        return f"grammar.ends is {ends}, expected ids below {vocabulary}, at least one."
    if request.ignore_eos or not set(ends) <= set(request.stop_ids):
        return "an answer with a grammar must end where its `ends` say: they must be stop ids, and not be ignored."
    return None


def _rope_fault(rows: list[list[int]], length: int) -> str | None:
    if len(rows) != 3 or any(len(row) != length for row in rows):
        return f"rope_positions has rows of {[len(row) for row in rows]} positions, expected three of {length}."
    if any(not 0 <= position < length for row in rows for position in row):
        return f"rope_positions must lie in 0 to {length - 1}: images take no more positions than tokens."
    return None


def _picture_fault(image: ImageInput, processor: ImageProcessor) -> str | None:
    factor, bytes_ = processor.factor, 3 * image.frames * image.height * image.width
    if image.frames != 1 and image.frames != processor.temporal:
        return f"{image.frames} frames: a picture has one, a video's group {processor.temporal}."
    if image.height < factor or image.width < factor or image.height % factor or image.width % factor:
        return f"a picture of {image.width} x {image.height} pixels is not whole tokens of {factor} x {factor}."
    if len(image.pixels) != bytes_ or image.height * image.width > processor.max_pixels:
        return (
            f"a picture of {image.width} x {image.height} pixels has {len(image.pixels)} bytes, expected {bytes_}, "
            f"of at most {processor.max_pixels} pixels."
        )
    return None
