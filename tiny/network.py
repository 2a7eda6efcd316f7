"""The training form of the tiny model: the family's text model and MTP layer, written for fast training.

Shapes: B rows, T positions, H heads. Parameters carry the checkpoint's names (``parameter_name`` adds the prefix).
The gated delta rule runs in chunks in float32; everything else follows the caller's autocast. ``tests/tiny`` holds
this module against transformers' model with the same weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
DRAFTS = 3  # steps for which the MTP layer is unrolled


def parameter_name(local: str) -> str:
    """The checkpoint's name of a parameter of :class:`Network`."""
    return local if local.startswith(("lm_head.", "mtp.")) else "model.language_model." + local


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * (1 + w)`` in float32, returned in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class GatedNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * w * silu(z)`` over one value head, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight * F.silu(z.float())


class UnitLowerInverse(torch.autograd.Function):
    """``(I + A)^-1`` for strictly lower triangular A [..., C, C]; the gradient needs two products, no second solve."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        inverse = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ gradients[0] @ transposed).tril(-1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule from a zero state, in chunks of :data:`CHUNK`.

    q, k, v: [B, H, T, 128] float32, q and k L2-normalised, q scaled; g (log decay), beta: [B, H, T]. Returns
    [B, H, T, 128]. T is padded to whole chunks. Per position: S = e^g S; u = beta (v - S k); S += u k^T; o = S q.
    """
    length = q.shape[2]
    padding = -length % CHUNK
    if padding:
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        g, beta = F.pad(g, (0, padding)), F.pad(beta, (0, padding))
    q, k, v = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    g, beta = g.unflatten(2, (-1, CHUNK)).cumsum(-1), beta.unflatten(2, (-1, CHUNK)).unsqueeze(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    since_start, to_end = g.exp().unsqueeze(-1), (g[..., -1:] - g).exp().unsqueeze(-1)
    inverse = UnitLowerInverse.apply(((k * beta) @ k.transpose(-1, -2) * decay).tril(-1))
    fresh = inverse @ (v * beta)
    read = inverse @ (k * beta * since_start)
    within = q @ k.transpose(-1, -2) * decay
    asked, written, kept = q * since_start, (k * to_end).transpose(-1, -2), since_start[..., -1:, :]
    state = torch.zeros(*q.shape[:2], k.shape[-1], v.shape[-1], device=q.device)
    outputs = []
    for chunk in range(q.shape[2]):
        update = fresh[:, :, chunk] - read[:, :, chunk] @ state
        outputs.append(asked[:, :, chunk] @ state + within[:, :, chunk] @ update)
        state = state * kept[:, :, chunk] + written[:, :, chunk] @ update
    return torch.cat(outputs, dim=2)[:, :, :length]


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class LinearAttention(nn.Module):
    """Gated DeltaNet mixer: projections, causal convolution, delta rule, gated norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.key_heads, self.value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.key, self.value = c["linear_key_head_dim"], c["linear_value_head_dim"]
        self.sections = [self.key_heads * self.key] * 2 + [self.value_heads * self.value]
        size, channels = c["hidden_size"], sum(self.sections)
        self.in_proj_qkv = linear(size, channels)
        self.in_proj_z = linear(size, self.sections[2])
        self.in_proj_a = linear(size, self.value_heads)
        self.in_proj_b = linear(size, self.value_heads)
        self.conv1d = nn.Conv1d(channels, channels, c["linear_conv_kernel_dim"], groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.linspace(0.5, 12.0, self.value_heads).log())
        self.dt_bias = nn.Parameter(torch.full((self.value_heads,), -4.0))
        self.norm = GatedNorm(self.value, c["rms_norm_eps"])
        self.out_proj = linear(self.sections[2], size)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay and beta, each [..., value heads] float32."""
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return g, self.in_proj_b(x).float().sigmoid()

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved [..., channels] to q, k, v [..., value heads, 128] float32; each key head serves its group."""
        q, k, v = mixed.float().split(self.sections, dim=-1)
        group = self.value_heads // self.key_heads
        q = unit(q.unflatten(-1, (self.key_heads, self.key))) * self.key**-0.5
        k = unit(k.unflatten(-1, (self.key_heads, self.key)))
        return (
            q.repeat_interleave(group, dim=-2),
            k.repeat_interleave(group, dim=-2),
            v.unflatten(-1, (self.value_heads, self.value)),
        )

    def finish(self, out: Tensor, x: Tensor) -> Tensor:
        z = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.value))
        return self.out_proj(self.norm(out, z).flatten(-2))

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        taps = self.conv1d.weight.shape[-1]
        padded = F.pad(self.in_proj_qkv(x), (0, 0, taps - 1, 0))
        mixed = sum(
            (padded[:, tap : tap + x.shape[1]] * self.conv1d.weight[:, 0, tap] for tap in range(taps)),
            start=torch.zeros((), device=x.device),
        )
        q, k, v = (part.transpose(1, 2) for part in self.heads(F.silu(mixed)))
        g, beta = (gate.transpose(1, 2) for gate in self.gates(x))
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(q, k, v, g, beta)
        return self.finish(out.transpose(1, 2), x)


def rope_table(positions: Tensor, c: dict[str, Any]) -> Tensor:
    """[2, T, rotary / 2] float32: cosine and sine. For text all three mrope axes agree, so the sections do not show."""
    parameters = c["rope_parameters"]
    rotary = int(c["head_dim"] * parameters["partial_rotary_factor"])
    frequencies = parameters["rope_theta"] ** (-torch.arange(0, rotary, 2, device=positions.device).float() / rotary)
    angles = positions.float().unsqueeze(-1) * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turns the first dimensions of x [B, H, T, D], pairs (j, j + rotary / 2)."""
    half = rope.shape[-1]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cosine, sine = rope
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine, rest), dim=-1)


class Attention(nn.Module):
    """Gated attention with grouped key/value heads; ``q_proj`` rows are [query | gate] per head."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.query_heads, self.kv_heads, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        hidden = c["hidden_size"]
        self.q_proj = linear(hidden, self.query_heads * self.size * 2)
        self.k_proj = linear(hidden, self.kv_heads * self.size)
        self.v_proj = linear(hidden, self.kv_heads * self.size)
        self.o_proj = linear(self.query_heads * self.size, hidden)
        self.q_norm = RMSNorm(self.size, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.size, c["rms_norm_eps"])

    def project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [B, query heads, T, D], k and v [B, kv heads, T, D], gate [B, T, query heads * D]."""
        q, gate = self.q_proj(x).unflatten(-1, (self.query_heads, 2 * self.size)).chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.size))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), rope).to(v.dtype)
        k = rotate(self.k_norm(k).transpose(1, 2), rope).to(v.dtype)
        return q, k, v, gate.flatten(-2)

    def wide(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.query_heads // self.kv_heads, dim=1)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(-2) * gate.sigmoid())

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, rope)
        return self.finish(F.scaled_dot_product_attention(q, self.wide(k), self.wide(v), is_causal=True), gate)


class MLP(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.gate_proj = linear(c["hidden_size"], c["intermediate_size"])
        self.up_proj = linear(c["hidden_size"], c["intermediate_size"])
        self.down_proj = linear(c["intermediate_size"], c["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer; the mixer stands under the name the checkpoint gives it."""

    def __init__(self, c: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        if kind == "full_attention":
            self.self_attn = Attention(c)
        else:
            self.linear_attn = LinearAttention(c)
        self.mlp = MLP(c)

    @property
    def mixer(self) -> Attention | LinearAttention:
        return self.self_attn if hasattr(self, "self_attn") else self.linear_attn

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.mixer(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTP(nn.Module):
    """The layer that drafts: ``fc(concat(norm_e(embedding), norm_h(hidden)))``, one attention layer, a norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        size, eps = c["hidden_size"], c["rms_norm_eps"]
        self.fc = linear(2 * size, size)
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = RMSNorm(size, eps)

    def step(self, embedding: Tensor, hidden: Tensor, rope: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One step of all chains at once; chain i starts at position i. embedding, hidden: [B, L, hidden size].

        A chain sees the cache as decoding leaves it: first-step entries of positions up to its own start (made from
        the main model's hidden states), and its own entries of the later steps. Appends this step's to ``earlier``.
        """
        layer = self.layers[0]
        assert isinstance(layer, Layer) and isinstance(layer.mixer, Attention)
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), dim=-1)).float()
        attention = layer.mixer
        q, k, v, gate = attention.project(layer.input_layernorm(x), rope)
        k, v = attention.wide(k), attention.wide(v)
        earlier.append((k, v))
        scale, length = attention.size**-0.5, q.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ earlier[0][0].transpose(-1, -2) * scale).float().masked_fill(future, float("-inf"))]
        scores += [(q * own).sum(-1, keepdim=True).float() * scale for own, _ in earlier[1:]]
        weights = torch.cat(scores, dim=-1).softmax(-1).to(v.dtype)
        out = weights[..., :length] @ earlier[0][1]
        for at, (_, own) in enumerate(earlier[1:]):
            out = out + weights[..., length + at, None] * own
        x = x + attention.finish(out, gate)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


class Network(nn.Module):
    """The text model with its head and its MTP layer. ``c`` is the text part of the configuration."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList([Layer(c, kind) for kind in c["layer_types"]])
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.lm_head = linear(c["hidden_size"], c["vocab_size"])
        self.mtp = MTP(c)
        self.draw_weights()

    def draw_weights(self) -> None:
        """Normal matrices scaled to their inputs; small ones where a layer writes into the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                width = parameter.shape[1] if name != "embed_tokens.weight" else 4
                nn.init.normal_(parameter, std=0.5 * width**-0.5 if "lm_head" not in name else 0.01)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter.data.mul_(0.3)

    def layer_list(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] to the state after the final norm, [B, T, hidden size] float32."""
        rope = rope_table(torch.arange(tokens.shape[1], device=tokens.device), self.c)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)

    def drafts(self, tokens: Tensor, hidden: Tensor) -> list[Tensor]:
        """The MTP layer's outputs after its norm, step by step, each [B, T - DRAFTS, hidden size]. Step j of chain i
        reads token i + j and stands for position i + j: its head predicts token i + j + 1."""
        length = tokens.shape[1] - DRAFTS
        embeddings = self.embed_tokens(tokens)
        state, outputs = hidden[:, :length], []
        earlier: list[tuple[Tensor, Tensor]] = []
        for step in range(1, DRAFTS + 1):
            rope = rope_table(torch.arange(step - 1, step - 1 + length, device=tokens.device), self.c)
            state = self.mtp.step(embeddings[:, step : step + length], state, rope, earlier)
            outputs.append(state)
        return outputs
