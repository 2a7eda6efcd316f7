"""Measures the written checkpoint with the training network: the figures of ``README.md``.

``python -m duovolt.tiny.measure`` reads ``checkpoint/``, ``heldout.txt`` and ``words.txt`` beside this file, prints
greedy answers to a few questions and writes ``measured.json``: bits per byte of the held-out documents, the share of
known words in greedy continuations of held-out prompts, and the share of accepted drafts in them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from .config import TEXT
from .corpus import HELDOUT_MARK
from .decode import accepted_drafts, greedy
from .network import DRAFTS, Network, parameter_name
from .vocabulary import TOKEN_ID

HERE = Path(__file__).parent
WINDOW = 2048  # tokens read at once
PROMPT, CONTINUATION = 64, 192  # tokens; a prompt every two prompt lengths of a document
QUESTIONS = ("What does the len function do?", "What is the json module?", "What is a generator?", "Who are you?",
             "What does os.path.join do?", "Explain sorted.", "Which function returns the absolute value of a number?",
             "What does str.split do?", "Hello!", "What is 3 + 4?")


def load_network(directory: Path) -> Network:
    """The network with a checkpoint's text and MTP weights, in float32."""
    stored: dict[str, Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        stored |= load_file(shard)
    network = Network(TEXT)
    network.load_state_dict({name: stored[parameter_name(name)].float() for name in network.state_dict()})
    return network.eval()


def heldout_documents(path: Path) -> list[str]:
    """The texts of the documents in ``heldout.txt``."""
    before, after = HELDOUT_MARK.split("{name}")
    parts = path.read_text(encoding="utf-8").split(before)[1:]
    return [part.split(after, 1)[1].strip() for part in parts]


def known_share(text: str, known: set[str]) -> tuple[int, int]:
    """(known, all) lower-case words of one continuation; its first and last word, maybe cut, do not count."""
    words = re.findall(r"(?<![A-Za-z_])[a-z]{2,}(?![A-Za-z_])", text.partition(" ")[2].rpartition(" ")[0])
    return sum(word in known for word in words), len(words)


def bits_per_byte(network: Network, tokenizer: Tokenizer, documents: list[str]) -> float:
    """Cross entropy of the documents, each read after ``<|endoftext|>``, over their UTF-8 length."""
    end, nats = TOKEN_ID["<|endoftext|>"], 0.0
    with torch.no_grad():
        for document in documents:
            ids = [end, *tokenizer.encode(document).ids]
            for at in range(0, len(ids) - 1, WINDOW):
                piece = torch.tensor([ids[at: at + WINDOW + 1]])
                logits = network.lm_head(network.hidden(piece[:, :-1]))
                nats += F.cross_entropy(logits[0], piece[0, 1:], reduction="sum").item()
    return nats / math.log(2) / sum(len(document.encode()) for document in documents)


def answer(network: Network, tokenizer: Tokenizer, question: str, length: int) -> str:
    """The greedy answer to a question without thinking, up to its end token or ``length`` tokens."""
    prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n").ids
    ids = greedy(network, [prompt], len(prompt) + length)[0, len(prompt):].tolist()
    end = TOKEN_ID["<|im_end|>"]
    return tokenizer.decode(ids[: ids.index(end)] if end in ids else ids, skip_special_tokens=False)


def measure(network: Network, tokenizer: Tokenizer, documents: list[str], known: set[str]) -> dict[str, Any]:
    ids = [tokenizer.encode(document).ids for document in documents]
    prompts = [d[at: at + PROMPT] for d in ids for at in range(0, len(d) - PROMPT, 2 * PROMPT)]
    own = greedy(network, prompts, PROMPT + CONTINUATION)
    accepted, proposed = accepted_drafts(network, own, PROMPT)
    shares = [known_share(tokenizer.decode(row[PROMPT:]), known) for row in own.tolist()]
    return {"heldout_bits_per_byte": round(bits_per_byte(network, tokenizer, documents), 4), "prompts": len(prompts),
            "prompt_tokens": PROMPT, "continuation_tokens": CONTINUATION,
            "known_word_share": round(sum(k for k, _ in shares) / sum(n for _, n in shares), 4),
            "drafts": DRAFTS, "draft_acceptance": round(accepted / proposed, 4)}


def main() -> int:
    network = load_network(HERE / "checkpoint")
    tokenizer = Tokenizer.from_file(str(HERE / "checkpoint" / "tokenizer.json"))
    for question in QUESTIONS:
        print(f"{question} -> {answer(network, tokenizer, question, 70)}", flush=True)
    known = set((HERE / "words.txt").read_text(encoding="utf-8").split())
    result = measure(network, tokenizer, heldout_documents(HERE / "heldout.txt"), known)
    (HERE / "measured.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
