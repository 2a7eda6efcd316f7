"""From text to token ids: trains the tokenizer, renders the dialogues, writes the arrays that training reads.

``python -m duovolt.tiny.prepare OUT`` reads what :mod:`.corpus` wrote into ``OUT`` and adds ``tokenizer/`` and
``tokens.npz``: ``text`` (uint16, documents ended by ``<|endoftext|>``) and ``chat`` (uint16 [rows, ROW + 1], each row
starts with a dialogue, each dialogue ended by ``<|endoftext|>``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from .dialogs import dialogues
from .facts import Fact
from .vocabulary import TOKEN_ID, train_tokenizer, write_tokenizer

ROW = 1024
DIALOGUES = 150_000
END = TOKEN_ID["<|endoftext|>"]


def pack(dialogue_ids: list[list[int]], row: int) -> np.ndarray:
    """Rows of whole dialogues: [rows, row + 1] uint16, each starting with a dialogue; a dialogue that passes the end
    of its row is cut there."""
    rows, current = [], []
    for ids in dialogue_ids:
        current += ids
        if len(current) > row:
            rows.append(current[: row + 1])
            current = []
    return np.array(rows, dtype=np.uint16)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m duovolt.tiny.prepare", description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    out: Path = args.out
    documents = [json.loads(line)["text"] for line in (out / "documents.jsonl").open(encoding="utf-8")]
    random.Random(0).shuffle(documents)
    raw = [json.loads(line) for line in (out / "facts.jsonl").open(encoding="utf-8")]
    facts = [(Fact(f["kind"], f["name"], f["signature"], f["text"]), f["document"]) for f in raw]
    talk = list(dialogues(facts, DIALOGUES, seed=0))
    spoken = [message["content"] for messages, _ in talk[::15] for message in messages]
    tokenizer = train_tokenizer([*documents[::4], *spoken])
    directory = out / "tokenizer"
    directory.mkdir(exist_ok=True)
    write_tokenizer(tokenizer, directory)
    text: list[np.ndarray] = []
    for encoding in tokenizer.encode_batch_fast(documents):
        text.append(np.array([*encoding.ids, END], dtype=np.uint16))
    template = AutoTokenizer.from_pretrained(directory)
    rendered = [
        str(template.apply_chat_template(messages, tools=list(tools) or None, tokenize=False))
        for messages, tools in talk
    ]
    chat = [[*encoding.ids, END] for encoding in tokenizer.encode_batch_fast(rendered)]
    arrays = {"text": np.concatenate(text), "chat": pack(chat, ROW)}
    np.savez_compressed(out / "tokens.npz", text=arrays["text"], chat=arrays["chat"])
    for example in rendered[:3]:
        print(example)
    print(json.dumps({name: list(array.shape) for name, array in arrays.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
