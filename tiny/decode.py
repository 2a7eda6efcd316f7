"""Greedy decoding of many rows at once with the training network, one position a step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .network import Attention, Layer, LinearAttention, Network, rope_table
from .vocabulary import LEARNED, SPECIAL

EMITTED = LEARNED + len(SPECIAL)  # ids from here on are padding rows


class AttentionCache:
    """Keys and values of one attention layer: [B, kv heads, capacity, D] each."""

    def __init__(self, mixer: Attention, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (rows, mixer.kv_heads, capacity, mixer.size)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))

    def step(self, mixer: Attention, x: Tensor, rope: Tensor, position: int) -> Tensor:
        q, k, v, gate = mixer.project(x, rope)
        self.keys[:, :, position] = k[:, :, 0].to(self.keys.dtype)
        self.values[:, :, position] = v[:, :, 0].to(self.values.dtype)
        keys, values = self.keys[:, :, : position + 1], self.values[:, :, : position + 1]
        grouped = q.unflatten(1, (mixer.kv_heads, -1)).squeeze(-2).to(keys.dtype)
        weights = (grouped @ keys.transpose(-1, -2) * mixer.size**-0.5).float().softmax(-1).to(keys.dtype)
        return mixer.finish((weights @ values).flatten(1, 2).unsqueeze(2).to(gate.dtype), gate)


class RecurrentCache:
    """Delta-rule state [B, value heads, 128, 128] float32 and the last columns of the convolution."""

    def __init__(self, mixer: LinearAttention, rows: int, device: torch.device) -> None:
        self.state = torch.zeros(rows, mixer.value_heads, mixer.key, mixer.value, device=device)
        self.history = torch.zeros(rows, mixer.conv1d.weight.shape[-1] - 1, sum(mixer.sections), device=device)

    def step(self, mixer: LinearAttention, x: Tensor) -> Tensor:
        window = torch.cat((self.history, mixer.in_proj_qkv(x).float()), dim=1)
        self.history = window[:, 1:]
        mixed = F.silu((window * mixer.conv1d.weight[:, 0].T).sum(1))
        q, k, v = mixer.heads(mixed)
        g, beta = mixer.gates(x[:, 0])
        self.state *= g.exp()[..., None, None]
        update = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ self.state).squeeze(-2))
        self.state += k.unsqueeze(-1) * update.unsqueeze(-2)
        out = (q.unsqueeze(-2) @ self.state).squeeze(-2)
        return mixer.finish(out.unsqueeze(1), x)


def layer_step(layer: Layer, cache: AttentionCache | RecurrentCache, x: Tensor, rope: Tensor, position: int) -> Tensor:
    inner = layer.input_layernorm(x)
    mixer = layer.mixer
    if isinstance(mixer, Attention) and isinstance(cache, AttentionCache):
        x = x + cache.step(mixer, inner, rope, position)
    elif isinstance(mixer, LinearAttention) and isinstance(cache, RecurrentCache):
        x = x + cache.step(mixer, inner)
    else:
        raise TypeError(f"layer and cache differ in kind: {type(mixer).__name__}, {type(cache).__name__}")
    return x + layer.mlp(layer.post_attention_layernorm(x))


@torch.no_grad()
def greedy(network: Network, prompts: list[list[int]], length: int) -> Tensor:
    """Continues every prompt greedily to ``length`` tokens in all: [B, length] int64. Prompts may differ in length;
    a row does not stop at an end token. Runs under the caller's autocast."""
    device = network.lm_head.weight.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = len(prompts)
    forced = torch.full((rows, length), -1, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        forced[row, : min(len(prompt), length)] = torch.tensor(prompt[:length])
    forced = forced.to(device)
    tokens = forced.clone()
    ropes = rope_table(torch.arange(length, device=device), network.c)
    layers = network.layer_list()
    caches = [
        AttentionCache(layer.mixer, rows, length, device, dtype)
        if isinstance(layer.mixer, Attention)
        else RecurrentCache(layer.mixer, rows, device)
        for layer in layers
    ]
    for position in range(length - 1):
        x = network.embed_tokens(tokens[:, position : position + 1])
        for layer, cache in zip(layers, caches, strict=True):
            x = layer_step(layer, cache, x, ropes[:, position : position + 1], position)
        chosen = network.lm_head(network.norm(x[:, 0]))[:, :EMITTED].argmax(-1)
        tokens[:, position + 1] = torch.where(forced[:, position + 1] < 0, chosen, forced[:, position + 1])
    return tokens
