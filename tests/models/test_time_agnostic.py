"""gidd-unif and Sumi: parity with their transcriptions, attention masks, the schedule, files, samplers, conformance."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import limpet
from limpet import conformance
from limpet.cli import main
from limpet.diffusion.process import clipped_snr
from limpet.errors import LimpetError
from limpet.models import WrappedDenoiser, gidd, sumi, time_agnostic
from limpet.models.loading import load
from model_cases import check, failed, features, refused, tiktoken_like
from time_agnostic_transcription import gidd as gidd_transcribed
from time_agnostic_transcription import sumi as sumi_transcribed

pytestmark = pytest.mark.usefixtures("offline")

GIDD_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|padding|>", "<|mask|>"]
SUMI_SPECIAL = ["<|beginoftext|>", "<|endoftext|>", "<|pad|>"]
GIDD_CONFIG = {"model_type": "gidd", "num_attention_heads": 3, "max_position_embeddings": 11, "noise_type": 1000.0,
               "attn_soft_cap": 2.0, "resid_scale": 3.0, "head_scaling": 1.7, "weight_scaling": 0.9, "is_causal": False,
               "rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True}  # fmt: skip
SUMI_CONFIG = {"model_type": "sumi", "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 11,
               "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
               "hidden_act": "silu", "tie_word_embeddings": False}  # fmt: skip
SAMPLERS = [limpet.Native(nfe=5), limpet.CRS(nfe=5), limpet.Mend(nfe=5)]


def randomised(network, seed=0):
    """Every parameter random, so that every path through the network matters; under the released names."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, parameter in network.named_parameters():
        scale = 0.5 if parameter.dim() == 1 or "_bias" in name else parameter.shape[-1] ** -0.5
        value = scale * torch.randn(parameter.shape, generator=generator)
        state[name if name.startswith("lm_head") else f"model.{name}"] = value + (parameter.detach() == 1)
    state["model.embed_tokens.weight"] *= parameter.shape[-1] ** 0.5
    return state


def gidd_folder(folder, config=None, special=GIDD_SPECIAL, **shape):
    folder.mkdir()
    size = tiktoken_like(folder, special, 280)
    sizes = {"vocab_size": size, "length": 11, "width": 24, "blocks": 3, "heads": 3, "hidden": 40, **shape}
    save_file(randomised(gidd.GiddNetwork(gidd.GiddShape(**sizes))), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GIDD_CONFIG | (config or {})))
    return folder


def sumi_folder(folder, config=None):
    folder.mkdir()
    size = tiktoken_like(folder, SUMI_SPECIAL, 280)
    shape = sumi.SumiShape(size, 11, 48, 3, 6, 40, 2)
    save_file(randomised(sumi.SumiNetwork(shape)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SUMI_CONFIG | (config or {})))
    return folder


MAKE = {"gidd": gidd_folder, "sumi": sumi_folder}


@pytest.fixture(params=MAKE)
def folder(request, tmp_path):
    return MAKE[request.param](tmp_path / request.param)


def tokens_of(model, batch=3):
    return torch.randint(model.vocab_size, (batch, 11), generator=torch.Generator().manual_seed(7))


def stored(folder):
    from safetensors.numpy import load_file

    return {name: value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()}


def clean_positions():
    """A prompt, nothing, and scattered positions."""
    clean = torch.zeros(3, 11, dtype=torch.bool)
    clean[0, :4], clean[2, [1, 5, 6, 10]] = True, True
    return clean


# Parity


@pytest.mark.parametrize("scaling", [0.9, "fan_in", "fan_out"])
@pytest.mark.parametrize("parts", [True, False])
def test_gidd_agrees_with_its_equations(tmp_path, scaling, parts):
    folder = gidd_folder(tmp_path / "m", {"weight_scaling": scaling}, bias=parts, sink=parts)
    model, p, clean = load(folder, device="cpu"), stored(folder), clean_positions()
    known = {"fan_in": lambda outward, inward: inward**-0.5, "fan_out": lambda outward, inward: outward**-0.5}
    scale = known.get(scaling, lambda outward, inward: scaling)
    tokens = tokens_of(model)
    ours = model.head(features(model, tokens, 0.5, lambda: None, clean)).float()
    theirs = np.stack([
        gidd_transcribed(p, row.tolist(), 3, ~clean[i].numpy(), 2.0, 3.0, scale, 1.7, 1e-5)
        for i, row in enumerate(tokens)
    ])  # fmt: skip
    assert theirs.std() > 0.5
    assert (ours[..., 3] == -math.inf).all()
    assert np.abs(np.delete(ours.numpy() - theirs, 3, -1)).max() < 1e-5


def test_sumi_agrees_with_its_equations(tmp_path):
    folder = sumi_folder(tmp_path / "m")
    model, p = load(folder, device="cpu"), stored(folder)
    tokens = tokens_of(model)
    theirs = np.stack([sumi_transcribed(p, row.tolist(), 6, 2, 1e-5, 500.0) for row in tokens])
    assert theirs.std() > 0.5
    assert np.abs(model.logits(tokens, 0.5).numpy() - theirs).max() < 1e-5


def test_every_parameter_matters(folder):
    model = load(folder, device="cpu")
    model.network.requires_grad_(True)
    model.network.head(model.network.backbone(tokens_of(model))).square().sum().backward()
    assert all(parameter.grad.abs().max() > 1e-4 for parameter in model.network.parameters())


def test_bfloat16_is_near_float32(folder):
    exact, rounded = load(folder, device="cpu"), load(folder, device="cpu", precision="bfloat16")
    tokens = tokens_of(exact)
    one, other = exact.logits(tokens, 0.5), rounded.logits(tokens, 0.5)
    finite = one.isfinite()
    apart = (one - other)[finite].abs().max() / one[finite].abs().max()
    assert 1e-4 < apart < 5e-2
    assert exact.digest != rounded.digest
    assert {str(p.dtype) for p in rounded.network.parameters() if p.dim() == 1} <= {"torch.float32", "torch.bfloat16"}
    assert rounded.network.norm.weight.dtype == torch.float32


def test_time_changes_nothing(folder):
    model = load(folder, device="cpu")
    tokens = tokens_of(model)
    each = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    assert torch.equal(model.logits(tokens, 1.0), model.logits(tokens, 1e-5))
    assert torch.equal(model.logits(tokens, 1.0), model.logits(tokens, each))


# Which positions a query sees


def test_a_prompt_sees_no_noise(tmp_path):
    """At clean positions nothing depends on the noise; elsewhere everything depends on everything."""
    model = load(gidd_folder(tmp_path / "m"), device="cpu")
    tokens, clean = tokens_of(model), clean_positions()
    noise = torch.where(clean, tokens, (tokens + 1) % model.vocab_size)
    one, other = (features(model, each, 0.5, lambda: None, clean) for each in (tokens, noise))
    assert torch.allclose(one[clean], other[clean], atol=1e-6)
    assert ((one - other)[~clean].abs().amax(-1) > 1e-3).all()
    unmasked = features(model, tokens, 0.5)
    assert (one - unmasked)[0].abs().max() > 1e-3
    assert torch.allclose(one[1], unmasked[1], atol=1e-6)  # where nothing is clean, nothing is hidden


class Recorder(WrappedDenoiser):
    """A model that records which tokens it was given as clean."""

    def __init__(self, inner, clean_tokens):
        super().__init__(inner)
        self.clean_tokens, self.recorded = clean_tokens, []

    def backbone(self, inputs):
        self.recorded.append(None if inputs.clean is None else inputs.clean.clone())
        return self.inner.backbone(inputs._replace(clean=None))


@pytest.mark.parametrize("sampler", [limpet.Native(nfe=6), limpet.CRS(nfe=6), limpet.Mend(nfe=6)])
def test_samplers_give_a_model_the_clean_tokens_that_it_wants(sampler):
    source = limpet.load("exact:chain")
    tokens = {0: 3, 1: 4, 9: 5}
    fixed = torch.zeros(2, 128, dtype=torch.bool)
    fixed[:, list(tokens)] = True
    outs, recorded = [], {}
    for kind in ("ignored", "fixed", "committed"):
        model = Recorder(source, kind)
        outs.append(limpet.sample(model, sampler, n=2, fixed=tokens, batch_size=2))
        recorded[kind] = model.recorded
        assert outs[-1].nfe == len(model.recorded) == sampler.nfe
    assert all(torch.equal(outs[0].tokens, out.tokens) for out in outs)  # the model ignores it, and samples the same
    assert recorded["ignored"] == [None] * sampler.nfe
    assert all(torch.equal(clean, fixed) for clean in recorded["fixed"])
    steps = limpet.steps(source, sampler, n=2, fixed=tokens)
    for clean, step in zip(recorded["committed"], steps, strict=True):
        visible = step.masks.get("visible")
        assert torch.equal(clean, fixed if visible is None else fixed | visible)
    if isinstance(sampler, limpet.CRS):
        assert recorded["committed"][-1].sum() > fixed.sum()


def test_guidance_names_no_clean_tokens_where_it_hides_the_prompt():
    model = Recorder(limpet.load("exact:chain"), "fixed")
    limpet.sample(model, limpet.samplers.find("guided")(nfe=4), n=1, prompt=[3, 4, 5])
    assert [int(clean.sum()) for clean in model.recorded] == [0, 3, 0, 3]


def test_clean_tokens_has_three_values():
    with pytest.raises(LimpetError, match="clean_tokens 'everything'; it takes"):
        limpet.sample(Recorder(limpet.load("exact:chain"), "everything"), limpet.Native(nfe=2), n=1)


# The schedule


def test_the_schedule_is_even_between_its_log_odds():
    schedule = clipped_snr()
    signal = schedule.signal(torch.linspace(0, 1, 5, dtype=torch.float64))
    assert torch.allclose((signal / (1 - signal)).log()[[0, -1]], torch.tensor([9.0, -9.0], dtype=torch.float64))
    assert torch.allclose(signal.diff(), signal.diff()[:1].expand(4))
    assert float(signal[2]) == pytest.approx(0.5)
    step = (schedule.signal(0.500001) - schedule.signal(0.499999)) / 2e-6
    assert float(schedule.slope(0.5)) == pytest.approx(float(step), rel=1e-6)
    assert clipped_snr() is schedule
    assert clipped_snr(-5, 7).name == "clipped-snr -5 to 7"


# Sampling


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_conformance(folder, precision):
    model = load(folder, device="cpu", precision=precision)
    rows = check(model, "native", "crs", "mend", "gibbs", "gidd-adaptive")
    assert not failed(rows)
    assert conformance.verdict(model, rows).endswith("0 failed")
    found = {row.what: row.found for row in rows}
    assert found["clean positions"].startswith("not applicable" if model.clean_tokens == "ignored" else "largest")


def test_the_command_ends_in_a_verdict(folder, capsys):
    assert main.main(["check", str(folder), "--sampler", "crs", "--nfe", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].endswith("25 checks, 0 failed")
    assert main.main(["info", str(folder), "--device", "cpu"]) == 0
    assert "clipped-snr -9 to 9" in capsys.readouterr().out


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
def test_samples_keep_their_prompt_count_their_calls_and_do_not_depend_on_the_batch(folder, sampler):
    model = load(folder, device="cpu")
    out = limpet.sample(model, sampler, n=4, prompt="The ", seed=3)
    prompt = model.tokenizer.encode("The ")
    assert (out.tokens[:, : len(prompt)] == torch.tensor(prompt)).all()
    assert out.nfe == 5
    assert not (out.tokens == model.tokenizer.special.get("mask", -1)).any()
    alone = limpet.sample(model, sampler, n=4, prompt="The ", seed=3, batch_size=1)
    assert (alone.tokens != out.tokens).double().mean() < 0.1  # but for draws that round apart
    assert all(text.startswith("The ") for text in out.texts)


def test_a_recorded_trajectory_ends_in_the_sampled_tokens(folder, tmp_path):
    """Recording passes on which tokens are clean."""
    model, record = load(folder, device="cpu"), str(tmp_path / "x.limpet")
    options = ["--prompt", "The ", "--n", "1", "--device", "cpu", "--precision", "float32"]
    command = ["sample", "--model", str(folder), "--sampler", "crs nfe=5", "--record", record]
    assert main.main([*command, *options]) == 0
    expected = limpet.sample(model, limpet.CRS(nfe=5), n=1, prompt="The ").tokens[0]
    from limpet.recording.trajectory import Trajectory

    assert Trajectory.load(Path(record)).frames[-1].tokens.tolist() == expected.tolist()


# Files


@pytest.mark.parametrize("clean", [None, "some"])
def test_layers_are_compiled_once_and_are_the_layers(folder, clean, monkeypatch):
    """The program that a GPU runs, as the front end of the compiler traces it."""
    model = load(str(folder))
    tokens = tokens_of(model)
    clean = None if clean is None else clean_positions()
    plain = features(model, tokens, 0.5, lambda: None, clean)
    monkeypatch.setattr(time_agnostic, "has_triton", lambda device: True)
    traced = torch.compile(time_agnostic.run_layer, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(time_agnostic, "compiled_layer", lambda: traced)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = features(model, tokens, 0.5, lambda: None, clean)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


def test_the_attributes_of_a_model(folder):
    model = load(folder, device="cpu")
    assert (model.length, model.predicts, model.schedule.name) == (11, "leave-one-out", "clipped-snr -9 to 9")
    assert model.info["source"] == "folder"
    expected = {"gidd": {"eos": 1, "pad": 2, "mask": 3}, "sumi": {"eos": 1, "pad": 2}}[folder.name]
    assert model.tokenizer.special == expected
    assert model.clean_tokens == {"gidd": "fixed", "sumi": "ignored"}[folder.name]


def test_settings_are_in_the_digest(tmp_path):
    digests = {load(gidd_folder(tmp_path / str(i), config), device="cpu").digest for i, config in enumerate(
        [{}, {"head_scaling": 1.0}, {"attn_soft_cap": 30.0}, {"max_log_snr": 8.0}, {"mask_token_id": 4}])}  # fmt: skip
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"noise_type": 0.0}, "noise_type 0.0, so its noise is in part the mask token"),
        ({"noise_type": math.nan}, "noise_type nan, so its noise"),
        ({"noise_type": None}, "noise_type None, and a gidd-unif model takes a number"),
        ({"min_log_snr": 9.0}, "log-SNRs from 9.0 to 9.0"),
        ({"min_log_snr": -1e4, "noise_type": 1e5}, "takes a number from -500 to 500"),
        ({"max_log_snr": math.inf}, "takes a number from -500 to 500"),
        ({"rope_theta": 10**400}, "and a gidd-unif model takes a number above 0"),
        ({"max_position_embeddings": 1 << 40}, "takes a whole number from 1 to"),
        ({"is_causal": True}, "is_causal True, and a gidd-unif model takes false"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ({"use_qk_norm": False}, "use_qk_norm False"),
        ({"weight_scaling": "fan_about"}, "weight_scaling 'fan_about'"),
        ({"weight_scaling": []}, "weight_scaling"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0"),
        ({"num_attention_heads": 5}, "width 24, which 5 heads do not share evenly"),
        ({"num_attention_heads": 24}, "width 24, which 24 heads do not share evenly"),
        ({"num_attention_heads": 4}, r"misshapen: layers\.0\.self_attn\.k_bias"),
        ({"mask_token_id": 10**6}, "1000000 is no mask"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
    ],
)
def test_a_config_that_is_not_gidds(tmp_path, config, match):
    refused(gidd_folder(tmp_path / "m", config), match)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"num_key_value_heads": 4}, "6 heads of queries for 4 of keys"),
        ({"num_key_value_heads": 3}, r"misshapen: layers\.0\.self_attn\.k_proj"),
        ({"num_attention_heads": True}, "num_attention_heads True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"add_qkv_bias": 1}, "add_qkv_bias 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_parameters"),
        ({"rope_parameters": 3}, "rope_parameters 3"),
        ({"rope_theta": "x"}, "rope_theta 'x'"),
    ],
)
def test_a_config_that_is_not_sumis(tmp_path, config, match):
    refused(sumi_folder(tmp_path / "m", config), match)


def test_what_a_config_must_say(tmp_path):
    for name, make, field in (("g", gidd_folder, "noise_type"), ("s", sumi_folder, "num_attention_heads")):
        path = make(tmp_path / name) / "config.json"
        path.write_text(json.dumps({key: one for key, one in json.loads(path.read_text()).items() if key != field}))
        refused(path.parent, f"does not say {field}")


def test_damaged_weights(folder):
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    for change, match in (
        ({name: torch.ones(3, 3)}, r"misshapen: layers\.1\.mlp\.down_proj\.weight \(3, 3\)"),
        ({"model.extra": torch.ones(3)}, "unexpected: extra"),
        ({name: torch.full_like(state[name], math.nan)}, "NaN or infinity in " + name),
        ({"model.embed_tokens.weight": torch.ones(3)}, "lacks the matrices"),
        ({f"model.layers.{i}.x": torch.zeros(0) for i in range(600)}, "names 600 blocks"),
    ):
        save_file(state | change, folder / "model.safetensors")
        refused(folder, match)
    save_file({key: one for key, one in state.items() if key != name}, folder / "model.safetensors")
    refused(folder, r"missing: layers\.1\.mlp\.down_proj\.weight")
    for cut in (0, 5, 100, 1000):
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:cut])
        refused(folder, "not a whole safetensors file")
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no model")


def test_the_released_sizes():
    """Laid out without memory: Sumi's 7 billion parameters, and the names of its tensors."""
    with torch.device("meta"):
        network = sumi.SumiNetwork(sumi.SumiShape(100278, 2048, 4096, 36, 32, 12288, 8))
        large = gidd.GiddNetwork(gidd.GiddShape(131072, 2048, 2560, 32, 20, 10240))
    assert 7.2e9 < sum(parameter.numel() for parameter in network.parameters()) < 7.9e9
    assert len(list(network.parameters())) == 36 * 9 + 3
    assert len(list(large.parameters())) == 32 * 12 + 32 * 2 + 3
