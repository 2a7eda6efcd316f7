"""The messages between the proxy and the ranks. The proxy sends every rank the same ones, in the same order."""

from msgspec import Struct


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True):
    """How the next token is drawn; applied in the order of the fields' description.

    1. `logit_bias` adds to single logits; 2. `repetition_penalty` divides positive and multiplies negative logits of
    every token of prompt and answer; 3. `presence_penalty` (once) and `frequency_penalty` (times the count) subtract
    from the logits of the answer's tokens; 4. `temperature` divides, 0 means the most likely token (the lowest id of
    equals); 5. `top_k` most likely (0: all); 6. the smallest set whose mass reaches `top_p`; 7. tokens of at least
    `min_p` times the largest probability.

    `seed` and the position fix every random number. `logprobs`: 0 none; n >= 1 the natural logarithm of the model's
    own probability (before steps 1 to 7) of the token, and of the n - 1 most likely tokens there.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int = 0


class Grammar(Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer must read as; the tokens that may come next follow from the tokens before, alike on every rank.

    text    the grammar as the llguidance library writes it down
    after   the token from which it holds (the end of the reasoning): what comes up to it is free, but the answer may not
            end there; None: from the first token
    ends    ids that end an answer; allowed where the grammar is fulfilled
    """

    text: str
    after: int | None
    ends: list[int]


class ImageInput(Struct, frozen=True, forbid_unknown_fields=True):
    """A picture of a prompt, or the frames of a video that become one picture's tokens; the same bytes for every rank.

    start          index in the prompt of the first of its tokens
    height, width  in pixels; whole tokens both ways
    pixels         uint8 RGB, row by row, frame after frame
    frames         1: a picture; of a video, as many as a patch spans
    """

    start: int
    height: int
    width: int
    pixels: bytes
    frames: int = 1


class GenerateRequest(Struct, tag="generate", forbid_unknown_fields=True):
    """One answer to make.

    request_id      unique among the requests alive; unsigned 64-bit
    prompt          token ids, at least one
    max_tokens      tokens to produce at most; 0 only reads the prompt (to score it with `echo_logprobs`)
    stop_ids        ids that end the answer (the id itself is the last token given)
    ignore_eos      go on past `stop_ids`
    echo_logprobs   also give the log-probabilities of the prompt's own tokens from the second on
                    (`sampling.logprobs` must be 1 or more)
    rope_positions  three rows (time, height, width) of the prompt's rotary positions where it holds images; None: the
                    token's index. Tokens after the prompt go on from the largest of them plus one
    grammar         what the answer must read as; None: anything
    images          pictures in the order of their tokens; they need `rope_positions`
    checkpoints     lengths of beginnings of the prompt that later prompts are likely to share: places where a prefix
                    cache does well to keep the state
    """

    request_id: int
    prompt: list[int]
    max_tokens: int
    stop_ids: list[int]
    ignore_eos: bool
    sampling: SamplingParams
    echo_logprobs: bool = False
    rope_positions: list[list[int]] | None = None
    grammar: Grammar | None = None
    images: list[ImageInput] = []
    checkpoints: list[int] = []


class CancelRequest(Struct, tag="cancel", forbid_unknown_fields=True):
    """Stop the answer of `request_id`; nothing happens if it has ended already."""

    request_id: int


class TokenLogprob(Struct, array_like=True):
    """A token's log-probability and the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class TokenEvent(Struct):
    """What one step added to one answer.

    tokens           the new ids
    logprobs         one entry for each of `tokens` if asked for, else empty
    finish_reason    None while the answer goes on; "stop" (a stop id), "length" (max_tokens or the context's end),
                     "cancelled", "error" (see `error`)
    proposed         drafts judged in this step; `accepted`: those of them that stood
    prompt_tokens    length of the prompt
    prompt_logprobs  entries of the prompt tokens that this step read, if `echo_logprobs` asked for them
    admitted         the request has got its lane: the first event of every answer, without tokens
    cached_tokens    with `admitted`: prompt tokens that need not be read, because a cache holds them
    """

    request_id: int
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    proposed: int
    accepted: int
    prompt_tokens: int
    prompt_logprobs: list[TokenLogprob] = []
    error: str = ""
    admitted: bool = False
    cached_tokens: int = 0


class StepRecord(Struct):
    """What ranks compare after every step; equal on every rank, or the ranks have diverged.

    kind             "admit" (requests, or lanes for them), "prefill" (one chunk of one prompt, or a part of the work on
                     its pictures), "round" (every decoding lane), "idle" (only bookkeeping)
    tokens_produced  tokens this step gave out, over all lanes
    token_hash       xxh64 of request ids, counts and tokens, as little-endian 64-bit words; in front of
                     them, where the step read pictures, the hash of their embeddings
    position         tokens held in the caches of all lanes
    free_pages       pages left in the pool
    pending          requests that wait for a lane
    cached_tokens    tokens found in the prefix cache, of the prompts that got their lanes since the last record
    prefixes         prefixes in that cache; `evicted`: those let go so far
    """

    kind: str
    tokens_produced: int
    token_hash: int
    position: int
    free_pages: int
    pending: int
    cached_tokens: int = 0
    prefixes: int = 0
    evicted: int = 0
