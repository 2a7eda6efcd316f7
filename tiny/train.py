"""Trains the tiny model on one GPU: the main model with its MTP layer, then the MTP layer alone.

``python -m duovolt.tiny.train DATA OUT`` reads what :mod:`.corpus` and :mod:`.prepare` wrote into ``DATA`` and
writes ``OUT/weights.safetensors`` (BF16, the checkpoint's names) and ``OUT/training.json`` (the figures). The second
part trains on text and on the rounded main model's own greedy continuations, towards its distribution. The schedule
follows the clock, so that a training fits a lease of the given length on any card.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from .config import TEXT
from .decode import greedy
from .network import Network, parameter_name
from .optimizer import Optimizer
from .prepare import ROW

DRAFT_ROWS = 4  # one row in so many also trains the MTP layer in the first part
DRAFT_WEIGHT = 0.15
PROMPT = 64


class Data:
    """The token arrays on the device, and batches out of them ([rows, ROW + 1] int64)."""

    def __init__(self, path: Path, device: torch.device) -> None:
        arrays = np.load(path)
        self.text = torch.from_numpy(arrays["text"].astype(np.int32)).to(device)
        self.chat = torch.from_numpy(arrays["chat"].astype(np.int32)).to(device)

    def batch(self, rows: int, talk: float) -> Tensor:
        chat = round(rows * talk)
        starts = torch.randint(len(self.text) - ROW - 1, (rows - chat,), device=self.text.device)
        text = self.text[starts.unsqueeze(1) + torch.arange(ROW + 1, device=self.text.device)]
        picked = self.chat[torch.randint(len(self.chat), (chat,), device=self.text.device)]
        return torch.cat((text[: len(text) // 2], picked, text[len(text) // 2 :])).long()


def draft_loss(head: Tensor, states: list[Tensor], teacher: Tensor) -> Tensor:
    """Cross entropy of each step's distribution against the main model's at the same position. head [V, h],
    states [B, L, h] each, teacher logits [B, T, V]."""
    loss = torch.zeros((), device=teacher.device)
    for step, state in enumerate(states, start=1):
        goal = teacher[:, step : step + state.shape[1]].float().softmax(-1)
        loss = loss - (goal * F.linear(state, head).float().log_softmax(-1)).sum(-1).mean()
    return loss / len(states)


def text_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Trainer:
    """One training: the network, its compiled pieces and the clock."""

    def __init__(self, network: Network, data: Data, rows: int, peak: float, compiled: bool) -> None:
        self.network, self.data, self.rows, self.peak = network, data, rows, peak
        self.text_loss: Callable[..., Tensor] = torch.compile(text_loss) if compiled else text_loss
        self.draft_loss: Callable[..., Tensor] = torch.compile(draft_loss) if compiled else draft_loss
        if compiled:
            for layer in network.layers:
                layer.compile(dynamic=False)
            network.mtp.step = torch.compile(network.mtp.step, dynamic=False)  # type: ignore[method-assign]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.network.lm_head.weight.device.type, dtype=torch.bfloat16)

    def whole_step(self, progress: float) -> dict[str, Tensor]:
        tokens = self.data.batch(self.rows, 0.3 if progress < 0.65 else 0.5)
        inputs, chained = tokens[:, :-1], max(1, self.rows // DRAFT_ROWS)
        with self.autocast():
            hidden = self.network.hidden(inputs)
            logits = self.network.lm_head(hidden)
            loss = self.text_loss(logits, tokens[:, 1:])
            pick = slice(0, self.rows, self.rows // chained)
            states = self.network.drafts(inputs[pick], hidden[pick])
            draft = self.draft_loss(self.network.lm_head.weight, states, logits[pick].detach())
        (loss + DRAFT_WEIGHT * draft).backward()
        return {"loss": loss.detach(), "draft": draft.detach()}

    def draft_step(self, own: Tensor) -> dict[str, Tensor]:
        picked = own[torch.randint(len(own), (self.rows // 2,), device=own.device)]
        inputs = torch.cat((picked, self.data.batch(self.rows - self.rows // 2, 0.4)[:, :-1]))
        with self.autocast():
            with torch.no_grad():
                hidden = self.network.hidden(inputs)
                logits = self.network.lm_head(hidden)
            draft = self.draft_loss(self.network.lm_head.weight, self.network.drafts(inputs, hidden), logits)
        draft.backward()
        return {"draft": draft.detach()}

    def run(
        self, label: str, seconds: float, peak: float, step: Callable[[float], dict[str, Tensor]]
    ) -> dict[str, Any]:
        """Repeats ``step`` for ``seconds`` after the first (compiling) steps; returns the figures of the part."""
        optimizer, device = Optimizer(self.network), self.network.lm_head.weight.device
        started, began, steps, report = time.monotonic(), 0.0, 0, {}  # type: ignore[var-annotated]
        while True:
            if steps == 4:
                began = time.monotonic()
            progress = min(1.0, (time.monotonic() - began) / seconds) if steps >= 4 else 0.0
            figures = step(progress)
            decay = 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * max(0.0, progress - 0.15) / 0.85))
            optimizer.step(peak * min(1.0, (steps + 1) / 150) * decay)
            steps += 1
            if steps % 8 == 0 and device.type == "cuda":
                torch.cuda.synchronize()  # the clock must not run ahead of the card
            if steps % 100 == 0 or progress >= 1.0:
                report = {
                    "part": label,
                    "steps": steps,
                    "compile_seconds": round(began - started, 1),
                    "seconds": round(time.monotonic() - began, 1),
                    "tokens": steps * self.rows * ROW,
                    **{name: round(value.item(), 4) for name, value in figures.items()},
                }
                print(json.dumps(report), flush=True)
            if progress >= 1.0:
                return report


def round_weights(network: Network) -> None:
    """Rounds every parameter to BF16 in place: what is measured is what is written."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m duovolt.tiny.train", description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=405, help="length of the first part")
    parser.add_argument("--draft-seconds", type=float, default=75, help="length of the second part")
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {ROW} tokens a step")
    parser.add_argument("--own-rows", type=int, default=2560, help="greedy rows made for the second part")
    parser.add_argument("--peak", type=float, default=8e-3, help="highest learning rate")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    data = Data(args.data / "tokens.npz", device)
    network = Network(TEXT).to(device)
    trainer = Trainer(network, data, args.rows, args.peak, compiled=device.type == "cuda")
    parts = [trainer.run("whole", args.seconds, args.peak, trainer.whole_step)]
    round_weights(network)
    began = time.monotonic()
    with trainer.autocast():
        half = data.batch(args.own_rows, 0.5)[:, :PROMPT].tolist()
        own = greedy(network, half, ROW)
    print(json.dumps({"own_rows": len(own), "seconds": round(time.monotonic() - began, 1)}), flush=True)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith("mtp."))
    parts.append(trainer.run("draft", args.draft_seconds, args.peak / 2, lambda _: trainer.draft_step(own)))
    round_weights(network)
    args.out.mkdir(parents=True, exist_ok=True)
    weights = {
        parameter_name(name): value.detach().bfloat16().cpu().contiguous()
        for name, value in network.state_dict().items()
    }
    save_file(weights, args.out / "weights.safetensors")
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "parts": parts,
        "largest_weight": max(value.abs().max().item() for value in weights.values()),
    }
    (args.out / "training.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
