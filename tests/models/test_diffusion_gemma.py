"""DiffusionGemma: parity with transformers' forward and generate, two signals, self-conditioning, canvases, files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import limpet
from gemma_cases import CANVAS, SEED, folder_of, on_our_uniforms, transformers
from limpet import CRS, EntropyBound, Mend, Native, conformance, samplers
from limpet.cli import main
from limpet.diffusion import process
from limpet.diffusion.process import MAX_INFERRED_SIGNAL
from limpet.diffusion.rng import CounterRNG, canvas_seed
from limpet.errors import LimpetError
from limpet.generation import Inputs, pad_after_end, reply, rollout
from limpet.models import ModelInput, diffusion_gemma
from limpet.models.loading import load
from model_cases import check, failed, parted, refused

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ours(folder: Path) -> diffusion_gemma.Gemma:
    return load(folder, device="cpu")  # type: ignore[return-value]


def tokens(model: Any, length: int, seed: int = 0, rows: int = 3) -> Tensor:
    return torch.randint(model.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def conditioned(model: diffusion_gemma.Gemma, canvas: Tensor, logits: Tensor, temperature: float) -> Tensor:
    previous = model.self_condition(logits.flatten(0, 1) / temperature).view(*canvas.shape, -1)
    return model.head(model.backbone(ModelInput(canvas, 0.5, previous=previous)))


# Parity with the forward


@pytest.mark.parametrize("length", [3, 30])  # of the prompt; the window of sliding layers is 12
def test_logits_are_transformers_own(ours: diffusion_gemma.Gemma, theirs: Any, length: int) -> None:
    """After a prompt, after a canvas too, and with the distributions of the previous call."""
    prompt, first, second = (tokens(ours, size, seed) for seed, size in enumerate((length, CANVAS, CANVAS)))
    with torch.no_grad():
        expected = theirs(input_ids=prompt, decoder_input_ids=first).logits
        begun = ours.after(prompt)
        assert expected.std() > 3
        assert torch.allclose(begun.logits(first, 0.5), expected, atol=1e-5)
        again = theirs(input_ids=prompt, decoder_input_ids=first, self_conditioning_logits=expected / 0.7).logits
        assert (again - expected).abs().max() > 1
        assert torch.allclose(conditioned(begun, first, expected, 0.7), again, atol=1e-4)

        cache = transformers.DynamicCache(config=theirs.config.text_config)
        theirs.model.encoder(input_ids=prompt, past_key_values=cache)
        theirs.model.encoder(
            input_ids=first, past_key_values=cache, position_ids=torch.arange(length, length + CANVAS)[None]
        )
        expected = theirs(past_key_values=cache, decoder_input_ids=second).logits
    longer = begun.after(first)
    assert torch.allclose(longer.logits(second, 0.5), expected, atol=1e-5)
    some = begun.after(first[[2, 0]], torch.tensor([2, 0]))
    assert torch.allclose(some.logits(second[[2, 0]], 0.5), expected[[2, 0]], atol=1e-5)
    one = ours.after(prompt[:1]).after(first)  # one prompt for all samples
    assert torch.allclose(one.logits(second, 0.5)[0], expected[0], atol=1e-5)
    assert torch.equal(begun.logits(first, 0.5), ours.after(prompt).logits(first, 0.5))  # its own context is untouched
    assert len({ours.digest, begun.digest, longer.digest, some.digest, one.digest}) == 5


def test_bfloat16_is_transformers_bfloat16(folder: Path) -> None:
    exact = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model = load(folder, device="cpu", precision="bfloat16")
    prompt, canvas = tokens(model, 9), tokens(model, CANVAS, 1)
    with torch.no_grad():
        expected = exact(input_ids=prompt, decoder_input_ids=canvas).logits
    assert (model.after(prompt).logits(canvas, 0.5) - expected).abs().max() < 0.02 * expected.abs().max()
    assert model.precision == "bfloat16"


def test_every_number_of_the_text_is_read_and_matters(folder: Path, tmp_path: Path) -> None:
    """Changing any one tensor changes the logits. The vision network is not there."""
    model = load(folder, device="cpu")
    assert isinstance(model, diffusion_gemma.Gemma)
    model.network.requires_grad_(True)
    prompt, canvas = tokens(model, 14), tokens(model, CANVAS, 1)
    cache = transformers.DynamicCache(config=model.network.config.text_config)
    model.network.model.encoder(input_ids=prompt, past_key_values=cache)
    logits = model.network(past_key_values=cache, decoder_input_ids=canvas,
                           self_conditioning_logits=model.logits(canvas, 0.5)).logits  # fmt: skip
    logits.square().sum().backward()
    silent = [name for name, one in model.network.named_parameters() if one.grad is None or one.grad.abs().max() < 1e-6]
    assert not [name for name in silent if "encoder.language_model.layers.2" not in name]  # whose output nobody reads
    assert not any("vision" in name for name in model.network.state_dict())


# Parity with generate


@pytest.mark.parametrize(("strength", "settled", "bound"), [(1.0, 1e-9, 0.1), (1.0, 1e-9, 9.0), (0.2, 0.5, 0.1)])
def test_entropy_bound_is_generates_token_for_token(
    tmp_path: Path, strength: float, settled: float, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three canvases on the same uniforms: some rows end in one, some go on; with and without early stops."""
    folder = folder_of(tmp_path / "model", strength)
    theirs = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()
    ours = load(folder, device="cpu")
    assert isinstance(ours, diffusion_gemma.Gemma)
    samples, calls, prompt = 5, 9, tokens(ours, 20, rows=1)
    sampler = EntropyBound(nfe=calls, bound=bound, settled=settled, distribution="predicted")
    plain = reply(ours, sampler, samples, SEED, 3 * CANVAS, prompt[0])
    ours.ends = int(plain.tokens[0, 5]), int(plain.tokens[3, CANVAS + 2]), 3
    out = reply(ours, sampler, samples, SEED, 3 * CANVAS, prompt[0])
    bounded = transformers.models.diffusion_gemma.generation_diffusion_gemma.EntropyBoundSamplerConfig(bound)
    with on_our_uniforms(samples, monkeypatch):
        expected = theirs.generate(
            prompt.expand(samples, -1), max_new_tokens=3 * CANVAS, max_denoising_steps=calls, t_max=0.8, t_min=0.4,
            sampler_config=bounded, confidence_threshold=settled, stability_threshold=1, eos_token_id=list(ours.ends),
            pad_token_id=0,
        )  # fmt: skip
    new = expected.sequences[:, prompt.shape[1] :]
    assert torch.equal(out.tokens, new)
    assert len({int((row != 0).sum()) for row in new}) > 1  # they end in different places
    assert (plain.nfe < 3 * calls) == (settled > 0.1)


# Two signals


def test_the_evidence_is_that_of_the_level_inferred_from_the_canvas(ours: diffusion_gemma.Gemma) -> None:
    clean = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    inferred = ours.evidence_signal(0.2, clean)
    assert torch.allclose(inferred, torch.tensor([0.2, 0.4, 0.99], dtype=torch.float64))
    assert float(ours.evidence_signal(1 - 1e-5, clean)[0]) == MAX_INFERRED_SIGNAL
    shift = math.log1p(262144 * MAX_INFERRED_SIGNAL / (1 - MAX_INFERRED_SIGNAL))
    assert 17 < shift < 18  # nats, of logits within 30 either way


def inputs(samples: int, trace: bool = False) -> Inputs:
    return Inputs(torch.full((samples, CANVAS), -1), CounterRNG(SEED, torch.arange(samples)), trace=trace)


def test_committed_tokens_look_clean_and_the_transition_keeps_its_signal(ours: diffusion_gemma.Gemma) -> None:
    """CRS converts each sample's predictions with its own share of committed tokens: the dense distributions computed
    here are the backend's."""
    sampler, shares = CRS(nfe=8, budget=4.0), set()
    for step in rollout(ours, sampler, inputs(3, trace=True), stop=sampler.nfe - 1):
        share = step.masks["visible"].double().mean(-1)
        shares |= set(share.tolist())
        signal = step.context.signal(step.t)
        inferred = (share + (1 - share) * signal).clamp(max=MAX_INFERRED_SIGNAL)
        logits = ours.head(step.state.previous.values).double()  # type: ignore[union-attr]
        probs = process.leave_one_out(logits.softmax(-1), step.model_input, inferred)
        assert torch.allclose(step.outcome.deficit, 1 - probs.amax(-1), atol=1e-5)
    assert len(shares) > 3


# Self-conditioning


def test_a_call_is_given_the_prediction_of_the_previous_one(ours: diffusion_gemma.Gemma) -> None:
    """The first call is given none. A state that goes on along another trajectory takes its prediction there."""
    sampler, values, state = Native(nfe=6), [], None
    for step in rollout(ours, sampler, inputs(2), stop=3):
        previous = None if state is None else ours.head(state.previous.values).flatten(0, 1)
        previous = None if previous is None else ours.self_condition(previous).view(2, CANVAS, -1)
        state = step.state
        expected = ours.backbone(ModelInput(step.model_input, 0.5, previous=previous))
        assert torch.allclose(state.previous.values, expected, atol=1e-5)
        values.append(state.previous.values)
    assert (values[0] - values[1]).abs().max() > 0.1
    ends = [[*rollout(ours, sampler, inputs(2), start=state)][-1].tokens for _ in range(2)]
    assert torch.equal(*ends)
    without = [*rollout(ours, sampler, inputs(2), start=state._replace(previous=None))][-1].tokens
    assert not torch.equal(ends[0], without)


def test_pieces_change_nothing(ours: diffusion_gemma.Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    from limpet.diffusion import backends as steps

    whole = limpet.sample(ours, CRS(nfe=5), n=3).tokens
    monkeypatch.setitem(steps.PIECE, "cpu", 5 * ours.vocab_size)
    assert torch.equal(limpet.sample(ours, CRS(nfe=5), n=3).tokens, whole)


# Canvases


def test_the_first_canvas_is_what_sample_returns(ours: diffusion_gemma.Gemma) -> None:
    for sampler in (CRS(nfe=5), Mend(nfe=5), EntropyBound(nfe=5, distribution="predicted")):
        prompt = ours.prompt("Why is the sky blue?")
        out = reply(ours, sampler, 3, length=CANVAS, prompt="Why is the sky blue?")
        canvas = limpet.sample(ours.after(torch.tensor([prompt])), sampler, 3)
        assert torch.equal(out.tokens, pad_after_end(canvas.tokens, ours.ends, ours.pad)[0])
        assert torch.equal(out.committed, canvas.committed)
        assert out.nfe == canvas.nfe == 5


@pytest.mark.parametrize("name", samplers.available())
def test_every_sampler_replies_and_a_reply_does_not_depend_on_the_batch(ours: diffusion_gemma.Gemma, name: str) -> None:
    """Over two canvases. Guidance needs fixed tokens, and a canvas has none."""
    sampler = samplers.parse(name, nfe=6)[1]
    if sampler.needs_fixed:
        with pytest.raises(LimpetError, match="needs fixed tokens to guide by"):
            reply(ours, sampler, 2, length=2 * CANVAS, prompt=[2, 40, 41])
        return
    out = reply(ours, sampler, 4, length=2 * CANVAS, prompt=[2, 40, 41])
    alone = reply(ours, sampler, 2, length=2 * CANVAS, prompt=[2, 40, 41], batch_size=1, first=1)
    assert (out.tokens[1:3, : alone.tokens.shape[1]] != alone.tokens).double().mean() < 0.1  # draws that round apart
    assert out.nfe <= 12
    assert len(out.texts) == 4


def test_a_text_ends_once_and_is_padded() -> None:
    canvas = torch.tensor([[5, 6, 7, 8], [5, 1, 7, 1], [3, 3, 4, 4], [5, 6, 7, 1]])
    padded, goes_on = pad_after_end(canvas, (1, 3), 0)
    assert padded.tolist() == [[5, 6, 7, 8], [5, 1, 0, 0], [3, 0, 0, 0], [5, 6, 7, 1]]
    assert goes_on.tolist() == [True, False, False, False]


def test_canvases_have_seeds_of_their_own() -> None:
    seeds = [canvas_seed(seed, canvas) for seed in (0, 8200, 2**64 - 1) for canvas in range(50)]
    assert len(set(seeds)) == 150
    assert canvas_seed(8200, 0) == 8200
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_an_empty_prompt_is_the_token_that_begins_a_text(ours: diffusion_gemma.Gemma) -> None:
    """Also for the second canvas, whose context once lost that token."""
    empty, begun = (reply(ours, Native(nfe=3), 2, length=2 * CANVAS, prompt=ids) for ids in ([], [ours.begin]))
    assert torch.equal(empty.tokens, begun.tokens)


def test_samples_that_have_ended_cost_nothing(ours: diffusion_gemma.Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the batch, and the last one is sampled as it would be alone."""
    sizes: list[int] = []
    backbone = diffusion_gemma.Gemma.backbone
    monkeypatch.setattr(
        diffusion_gemma.Gemma, "backbone", lambda self, one: sizes.append(len(one.tokens)) or backbone(self, one)
    )
    free = reply(ours, Native(nfe=3), 3, length=3 * CANVAS, prompt=[2, 40])
    monkeypatch.setattr(ours, "ends", tuple({*free.tokens[0, :CANVAS].tolist()} - {*free.tokens[1].tolist()}))
    sizes.clear()
    out = reply(ours, Native(nfe=3), 3, length=3 * CANVAS, prompt=[2, 40])
    assert sizes[0] == 3
    assert sizes[-1] < 3
    assert torch.equal(out.tokens[1], free.tokens[1])
    assert (out.tokens[0, -CANVAS:] == ours.pad).all()


def test_a_chat_prompt_goes_through_the_template(ours: diffusion_gemma.Gemma) -> None:
    ids = ours.prompt("Why is the sky blue?")
    assert ids[0] == ours.begin == 2
    assert ids.count(4) == 2
    text = ours.tokenizer.decode(ids)  # type: ignore[union-attr]
    assert text == "<bos><|turn>user\nWhy is the sky blue?<turn|>\n<|turn>model\n"
    assert ours.ends == (1, 3)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=ours.tokenizer._tokens, bos_token="<bos>")  # type: ignore[union-attr]
    theirs.chat_template = ours.template
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    assert theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == ids


def test_the_command_replies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(folder), "--prompt", "Why?", "--n", "2", "--device", "cpu", "--precision", "float32"]
    for sampler in ("crs nfe=4", "mend nfe=4", "entropy-bound nfe=4 distribution=predicted"):
        assert main.main(["sample", *options, "--sampler", sampler, "--length", "32", "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        model = load(folder, device="cpu")
        assert isinstance(model, diffusion_gemma.Gemma)
        expected = reply(model, samplers.parse(sampler)[1], 2, length=32, prompt="Why?")
        assert [row["tokens"] for row in rows] == expected.tokens.tolist()


def test_a_trajectory_is_recorded_as_it_is_sampled(folder: Path, tmp_path: Path, ours: diffusion_gemma.Gemma) -> None:
    """A canvas without a prompt, with the prediction of each call before. A reply of several canvases has no record."""
    from limpet.recording.trajectory import Trajectory

    record = tmp_path / "x.limpet"
    command = ["sample", "--model", str(folder), "--n", "1", "--device", "cpu", "--precision", "float32"]
    command += ["--record", str(record), "--force"]
    for name, sampler in (("mend nfe=4", Mend(nfe=4)), ("entropy-bound nfe=4", EntropyBound(nfe=4))):
        assert main.main([*command, "--sampler", name]) == 0
        expected = limpet.sample(ours, sampler, n=1).tokens[0]
        assert Trajectory.load(record).frames[-1].tokens.tolist() == expected.tolist()
    assert main.main([*command, "--prompt", "Why?"]) == 2


# Conformance


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_conformance(folder: Path, precision: str) -> None:
    model = load(folder, device="cpu", precision=precision)
    rows = check(model, "crs", "entropy-bound distribution=predicted")
    assert not failed(rows)
    assert conformance.verdict(model, rows).endswith("0 failed")


@pytest.mark.long
@pytest.mark.parametrize("name", samplers.available())
def test_every_sampler_keeps_the_contract_on_it(ours: diffusion_gemma.Gemma, name: str) -> None:
    assert not failed(list(conformance.sampler_rows(ours, name, nfe=6)))


def test_prompts_are_kept_and_calls_are_counted(ours: diffusion_gemma.Gemma) -> None:
    for sampler in (Native(nfe=5), CRS(nfe=5), Mend(nfe=5)):
        out = limpet.sample(ours, sampler, n=3, prompt="The ", seed=3)
        prompt = ours.tokenizer.encode("The ")  # type: ignore[union-attr]
        assert (out.tokens[:, : len(prompt)] == torch.tensor(prompt)).all()
        assert out.nfe == 5


def test_a_cache_is_of_as_many_samples_as_the_text(ours: diffusion_gemma.Gemma) -> None:
    with pytest.raises(LimpetError, match="given the text before 2 samples, and is asked for 3"):
        limpet.sample(ours.after(tokens(ours, 4, rows=2)), Native(nfe=2), n=3)


# Files


def test_parts_are_the_same_model(folder: Path, tmp_path: Path, ours: diffusion_gemma.Gemma) -> None:
    import shutil

    copy = shutil.copytree(folder, tmp_path / "parts")
    assert load(parted(copy), device="cpu").digest == ours.digest


def test_shared_tensors_may_be_stored_under_the_encoders_name(
    folder: Path, tmp_path: Path, ours: diffusion_gemma.Gemma
) -> None:
    copy = changed(folder, tmp_path)
    state = load_file(copy / "model.safetensors")
    moved = {name.replace("model.decoder.layers.1.mlp", "model.encoder.language_model.layers.1.mlp"): one
             for name, one in state.items()}  # fmt: skip
    moved["lm_head.weight"] = moved["model.decoder.embed_tokens.weight"].clone()
    save_file(moved, copy / "model.safetensors")
    assert load(copy, device="cpu").digest == ours.digest


def changed(folder: Path, tmp_path: Path, config: dict[str, Any] | None = None, **text: Any) -> Path:
    import shutil

    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    settings = json.loads((copy / "config.json").read_text())
    settings["text_config"] |= text
    (copy / "config.json").write_text(json.dumps(settings | (config or {})))
    return copy


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ({"hidden_size": 1 << 40}, "hidden_size 1099511627776, and a DiffusionGemma model takes a whole number"),
        ({"hidden_size": 64}, r"does not fit a DiffusionGemma model of 3 layers \(misshapen"),
        ({"vocab_size": 1 << 23}, "misshapen: decoder.embed_tokens.weight"),
        ({"vocab_size": -1}, "vocab_size -1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000, and a DiffusionGemma model takes from 1 to 512"),
        ({"num_hidden_layers": 2}, "config.json lays out no network|does not fit"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": []}, "lays out no network|does not fit"),
        ({"num_attention_heads": 3}, "lays out no network|does not fit"),
        ({"num_key_value_heads": 3}, "lays out no network|does not fit"),
        ({"head_dim": 7}, "lays out no network|does not fit"),
        ({"num_experts": 5}, "misshapen"),
        ({"top_k_experts": 9}, "top_k_experts 9 of num_experts 4"),
        ({"hidden_activation": "__import__"}, "hidden_activation '__import__'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "lays out no network"),
        ({"per_layer_config": {"2": {"head_dim": 1 << 40}}}, "per_layer_config"),
        ({"per_layer_config": {"x": {}}}, "per_layer_config"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>'"),
        ({"eos_token_id": {}}, "eos_token_id"),
        ({"bos_token_id": 5000}, "begins, ends or pads a text with 5000, which is no token of its model"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps None"),
    ],
)
def test_wrong_settings_of_the_text(folder: Path, tmp_path: Path, text: dict[str, Any], match: str) -> None:
    refused(changed(folder, tmp_path, **text), match)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"text_config": []}, "text_config"),
        ({"text_config": {}}, "does not fit|lays out no network"),
        ({"canvas_length": 0}, "canvas_length 0"),
        ({"canvas_length": 1 << 60}, "canvas_length"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
    ],
)
def test_wrong_settings_of_the_model(folder: Path, tmp_path: Path, config: dict[str, Any], match: str) -> None:
    refused(changed(folder, tmp_path, config), match)


def test_unknown_settings_are_not_passed_on(folder: Path, tmp_path: Path, ours: diffusion_gemma.Gemma) -> None:
    """Code, kernels and devices that a config names are not used."""
    strange = {"auto_map": {"AutoModel": "evil--code.Evil"}, "_attn_implementation": "evil/kernels",
               "quantization_config": {"quant_method": "evil"}}  # fmt: skip
    copy = changed(folder, tmp_path, strange, _attn_implementation="evil/kernels", dtype="evil")
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/base"}')
    model = load(copy, device="cpu")
    assert isinstance(model, diffusion_gemma.Gemma)
    assert model.digest == ours.digest
    assert model.network.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("spoil", ["torn", "missing", "unexpected", "nan", "shape", "kind"])
def test_wrong_weights(folder: Path, tmp_path: Path, spoil: str) -> None:
    copy = changed(folder, tmp_path)
    file, name = copy / "model.safetensors", "model.decoder.layers.1.experts.gate_up_proj"
    state = load_file(file)
    one = state[name]
    state |= {"missing": {}, "unexpected": {"model.decoder.more": one.clone()}, "nan": {name: one.log()},
              "shape": {name: one[:2].clone()}, "kind": {name: one.long()}, "torn": {}}[spoil]  # fmt: skip
    if spoil == "missing":
        del state[name]
    save_file(state, file)
    if spoil == "torn":
        file.write_bytes(file.read_bytes()[:-100])
    matches = {"torn": "not a whole safetensors file", "missing": "missing: decoder.layers.1.experts.gate_up_proj",
               "unexpected": "unexpected: decoder.more", "nan": "NaN or infinity", "shape": "misshapen",
               "kind": "misshapen"}  # fmt: skip
    refused(copy, matches[spoil])


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("generation_config.json", b"{", "generation_config.json is not JSON"),
        ("generation_config.json", b'{"eos_token_id": [1, "x"]}', "eos_token_id"),
        ("generation_config.json", b'{"sampler_config": {"_cls_name": "evil"}}', None),
        ("chat_template.jinja", b"\xff\xfe", "chat template"),
        ("chat_template.jinja", b"a" * (2 << 20), "chat_template.jinja"),
        ("tokenizer_config.json", b"[" * 10**5, None),  # the template stands elsewhere
    ],
)
def test_files_beside_the_weights(folder: Path, tmp_path: Path, file: str, content: bytes, match: str | None) -> None:
    copy = changed(folder, tmp_path)
    (copy / file).write_bytes(content)
    if match is None:
        load(copy, device="cpu")
    else:
        refused(copy, match)


@pytest.mark.parametrize(
    "template", ["{% for", "{{ messages.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ 1 // 0 }}"]
)
def test_a_broken_template_is_one_sentence(folder: Path, tmp_path: Path, template: str) -> None:
    copy = changed(folder, tmp_path)
    (copy / "chat_template.jinja").write_text(template)
    model = load(copy, device="cpu")
    with pytest.raises(LimpetError, match=r"chat template of .* cannot be filled in"):
        model.prompt("Why?")  # type: ignore[attr-defined]


def test_a_model_without_a_template_is_given_the_text(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path)
    (copy / "chat_template.jinja").unlink()
    model = load(copy, device="cpu")
    assert model.prompt("Why?") == [2, *model.tokenizer.encode("Why?")]  # type: ignore[attr-defined, union-attr]
    (copy / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}say {{ messages[0].content }}"})
    )
    prompt = load(copy, device="cpu").prompt("Why?")  # type: ignore[attr-defined]
    assert model.tokenizer.decode(prompt) == "<bos>say Why?"  # type: ignore[union-attr]


def test_an_older_transformers_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion_gemma, "import_extra", lambda *_: type("Old", (), {"__version__": "5.0"}))
    refused(folder, "transformers 5.0 does not know DiffusionGemma: install 5.22 or later")
