"""gidd-unif and Sumi written out from their published equations, in float64 numpy, one position and one head at a time.

`p` holds the tensors under their released names; nothing is shared with the package."""

import numpy as np


def rms(x, eps):
    return x / np.sqrt(np.mean(np.square(x)) + eps)


def turned(x, position, base):
    """One head of one position: coordinate j turns with coordinate j + half, by position over base^(2j / width)."""
    half = len(x) // 2
    out = np.array(x)
    for j in range(half):
        angle = position / base ** (2 * j / len(x))
        out[j] = x[j] * np.cos(angle) - x[j + half] * np.sin(angle)
        out[j + half] = x[j + half] * np.cos(angle) + x[j] * np.sin(angle)
    return out


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gidd(p, tokens, heads, noisy, cap, resid, scale, head_scale, eps, base=10000.0):
    """(L,) tokens, and (L,) whether each is noise -> (L, V) logits, before any is forbidden.

    scale(outward, inward) multiplies every linear map of the layers; a query sees a key no noisier than itself."""
    layers = 1 + max(int(name.split(".")[2]) for name in p if name.startswith("model.layers."))
    x = [p["model.embed_tokens.weight"][token] for token in tokens]
    width = len(x[0]) // heads

    def linear(name, y):
        out = p[name + ".weight"] @ y * scale(*p[name + ".weight"].shape)
        return out + p[name + ".bias"] if name + ".bias" in p else out

    for i in range(layers):
        at = f"model.layers.{i}."
        normed = [rms(y, eps) * (1 + p[at + "attn_layernorm.weight"]) for y in x]
        q = [rms(linear(at + "self_attn.q_proj", y), eps) * (1 + p[at + "self_attn.q_norm.weight"]) for y in normed]
        k = [rms(linear(at + "self_attn.k_proj", y), eps) * (1 + p[at + "self_attn.k_norm.weight"]) for y in normed]
        v = [linear(at + "self_attn.v_proj", y) for y in normed]
        mixed = [np.zeros_like(y) for y in x]
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            for here in range(len(x)):
                query, visible = turned(q[here][part], here, base), []
                if at + "self_attn.k_bias" in p:
                    visible.append((p[at + "self_attn.k_bias"][h], p[at + "self_attn.v_bias"][h]))
                for there in range(len(x)):
                    if noisy[here] >= noisy[there]:
                        visible.append((turned(k[there][part], there, base), v[there][part]))
                scores = np.array([cap * np.tanh(query @ key / np.sqrt(width) / cap) for key, _ in visible])
                weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                mixed[here][part] = sum(weight * value for weight, (_, value) in zip(weights, visible, strict=True))
        for here in range(len(x)):
            x[here] = x[here] + resid / layers * linear(at + "self_attn.o_proj", mixed[here])
            normed = rms(x[here], eps) * (1 + p[at + "mlp_layernorm.weight"])
            inner = np.maximum(linear(at + "mlp.up_proj", normed), 0) ** 2
            x[here] = x[here] + resid / layers * linear(at + "mlp.down_proj", inner)
    features = [rms(y, eps) * (1 + p["model.norm.weight"]) for y in x]
    return np.array([p["lm_head.weight"] @ y * head_scale for y in features])


def sumi(p, tokens, heads, groups, eps, base):
    """(L,) tokens -> (L, V) logits; attention weights are exp(score) / (1 + sum of exp(score))."""
    layers = 1 + max(int(name.split(".")[2]) for name in p if name.startswith("model.layers."))
    x = [p["model.embed_tokens.weight"][token] for token in tokens]
    width = len(x[0]) // heads
    for i in range(layers):
        w = {name.removeprefix(f"model.layers.{i}."): value for name, value in p.items()}
        normed = [w["input_layernorm.weight"] * rms(y, eps) for y in x]
        q, k, v = ([w[f"self_attn.{kind}_proj.weight"] @ y for y in normed] for kind in "qkv")
        for here in range(len(x)):
            mixed = []
            for h in range(heads):
                own, theirs = slice(h * width, (h + 1) * width), h * groups // heads
                shared = slice(theirs * width, (theirs + 1) * width)
                query, top, bottom = turned(q[here][own], here, base), 0.0, 1.0
                for there in range(len(x)):
                    weight = np.exp(query @ turned(k[there][shared], there, base) / np.sqrt(width))
                    top, bottom = top + weight * v[there][shared], bottom + weight
                mixed.append(top / bottom)
            x[here] = x[here] + w["self_attn.o_proj.weight"] @ np.concatenate(mixed)
        for here in range(len(x)):
            normed = w["post_attention_layernorm.weight"] * rms(x[here], eps)
            gate = w["mlp.gate_proj.weight"] @ normed
            inner = gate * sigmoid(gate) * (w["mlp.up_proj.weight"] @ normed)
            x[here] = x[here] + w["mlp.down_proj.weight"] @ inner
    return np.array([p["lm_head.weight"] @ (p["model.norm.weight"] * rms(y, eps)) for y in x])
