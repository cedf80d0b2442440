"""The Duo network written out literally from its description, slowly and with nothing shared with the package.

One sequence, one head and one block at a time; `low` is the dtype of the linear maps (float32 or bfloat16), and every
change of dtype is spelled out."""

import math

import torch


def linear(x, weight, bias, low):
    """A linear map under autocast: input, weight and bias in `low`, and so the output."""
    y = x.to(low) @ weight.to(low).T
    return y if bias is None else y + bias.to(low)


def layer_norm(x, weight):
    """Mean and variance over the width in float32, eps 1e-5, gain afterwards, no bias."""
    x = x.to(torch.float32)
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight


def silu(x):
    return x * torch.sigmoid(x)


def gelu_tanh(x):
    y = x.to(torch.float32)
    y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    return y.to(x.dtype)


def condition(p, sigma):
    """(cond,) from one sigma: 128 frequencies, cosines before sines, two layers, and a second SiLU outside."""
    frequencies = torch.tensor([math.exp(-math.log(10000) * k / 128) for k in range(128)])
    embedded = torch.cat([torch.cos(sigma * frequencies), torch.sin(sigma * frequencies)])
    hidden = silu(p["sigma_map.mlp.0.weight"] @ embedded + p["sigma_map.mlp.0.bias"])
    return silu(p["sigma_map.mlp.2.weight"] @ hidden + p["sigma_map.mlp.2.bias"])


def rotate(x, low):
    """(L, head width) turned by position: the first half with the second, cos and sin cast before use."""
    length, width = x.shape
    half = width // 2
    out = torch.empty_like(x)
    for position in range(length):
        for j in range(half):
            angle = torch.tensor(position * 10000 ** (-2 * j / width), dtype=torch.float32)
            cos, sin = torch.cos(angle).to(low), torch.sin(angle).to(low)
            out[position, j] = x[position, j] * cos - x[position, j + half] * sin
            out[position, j + half] = x[position, j + half] * cos + x[position, j] * sin
    return out


def attend(q, k, v, low):
    """softmax(q k / sqrt(width)) v over all positions, with no mask."""
    scores = q.to(torch.float32) @ k.to(torch.float32).T / math.sqrt(q.shape[-1])
    return (torch.softmax(scores, -1) @ v.to(torch.float32)).to(low)


def forward(p, tokens, sigma, heads, low=torch.float32):
    """(L,) tokens and one sigma -> (L, V) logits in `low`."""
    x = torch.stack([p["vocab_embed.embedding"][token] for token in tokens])  # float32, and so stays
    c = condition(p, torch.tensor(float(sigma), dtype=torch.float32))
    width = x.shape[1]
    head_width = width // heads
    blocks = 1 + max(int(name.split(".")[1]) for name in p if name.startswith("blocks."))
    for i in range(blocks):
        b = {name.removeprefix(f"blocks.{i}."): value for name, value in p.items() if name.startswith(f"blocks.{i}.")}
        m = linear(c, b["adaLN_modulation.weight"], b["adaLN_modulation.bias"], low)
        shift_attn, scale_attn, gate_attn = m[:width], m[width : 2 * width], m[2 * width : 3 * width]
        shift_mlp, scale_mlp, gate_mlp = m[3 * width : 4 * width], m[4 * width : 5 * width], m[5 * width :]

        u = layer_norm(x, b["norm1.weight"]) * (1 + scale_attn) + shift_attn
        qkv = linear(u, b["attn_qkv.weight"], None, low)
        mixed = []
        for h in range(heads):
            q = qkv[:, h * head_width : (h + 1) * head_width]
            k = qkv[:, width + h * head_width : width + (h + 1) * head_width]
            v = qkv[:, 2 * width + h * head_width : 2 * width + (h + 1) * head_width]
            mixed.append(attend(rotate(q, low), rotate(k, low), v, low))
        branch = linear(torch.cat(mixed, -1), b["attn_out.weight"], None, low)
        x = x + gate_attn * branch  # the product in `low`, the sum in float32

        u = layer_norm(x, b["norm2.weight"]) * (1 + scale_mlp) + shift_mlp
        hidden = gelu_tanh(linear(u, b["mlp.0.weight"], b["mlp.0.bias"], low))
        x = x + gate_mlp * linear(hidden, b["mlp.2.weight"], b["mlp.2.bias"], low)
    m = linear(c, p["output_layer.adaLN_modulation.weight"], p["output_layer.adaLN_modulation.bias"], low)
    x = layer_norm(x, p["output_layer.norm_final.weight"]) * (1 + m[width:]) + m[:width]
    return linear(x, p["output_layer.linear.weight"], p["output_layer.linear.bias"], low)
