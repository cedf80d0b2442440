"""DiffusionGemma: parity with transformers' forward and generate, two signals, self-conditioning, canvases, files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from model_cases import parted
from torch import Tensor

import limpet
from gemma_cases import CANVAS, SEED, folder_of, on_our_uniforms, transformers
from limpet import CRS, EntropyBound, Mend, Native, conformance, samplers
from limpet.canvases import ended, reply
from limpet.cli import main
from limpet.diffusion.process import CLEAREST
from limpet.diffusion.rng import CounterRNG, canvas_seed
from limpet.errors import LimpetError
from limpet.models import diffusion_gemma
from limpet.models.loading import load
from limpet.recording.trajectory import Trajectory
from limpet.samplers.context import generate, open_context, stepped
from test_check import failed, rows_of
from model_cases import refused

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


def told(model: diffusion_gemma.Gemma, canvas: Tensor, logits: Tensor, temperature: float) -> Tensor:
    soft = model.carry(logits.flatten(0, 1) / temperature).view(*canvas.shape, -1)
    return model.head(model.body_carried(canvas, 0.5, None, soft))


# Parity with the forward


@pytest.mark.parametrize("length", [3, 30])  # of the prompt; the window of sliding layers is 12
def test_logits_are_transformers_own(ours: diffusion_gemma.Gemma, theirs: Any, length: int) -> None:
    """After a prompt, after a canvas too, and told of the last call."""
    prompt, first, second = (tokens(ours, size, seed) for seed, size in enumerate((length, CANVAS, CANVAS)))
    with torch.no_grad():
        expected = theirs(input_ids=prompt, decoder_input_ids=first).logits
        begun = ours.after(prompt)
        assert expected.std() > 3
        assert torch.allclose(begun.logits(first, 0.5), expected, atol=1e-5)
        again = theirs(input_ids=prompt, decoder_input_ids=first, self_conditioning_logits=expected / 0.7).logits
        assert (again - expected).abs().max() > 1
        assert torch.allclose(told(begun, first, expected, 0.7), again, atol=1e-4)

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
    """Spoil any one tensor and the logits differ; the eyes are not there."""
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
    sampler = EntropyBound(nfe=calls, bound=bound, settled=settled, probs="predicted")
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
    made = expected.sequences[:, prompt.shape[1] :]
    assert torch.equal(out.tokens, made)
    assert len({int((row != 0).sum()) for row in made}) > 1  # they end in different places
    assert (plain.nfe < 3 * calls) == (settled > 0.1)


# Two signals


def test_evidence_is_that_of_the_canvas_as_it_looks(ours: diffusion_gemma.Gemma) -> None:
    clean = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    seen = ours.evidence(0.2, clean)
    assert torch.allclose(seen, torch.tensor([0.2, 0.4, 0.99], dtype=torch.float64))
    assert float(ours.evidence(1 - 1e-5, clean)[0]) == CLEAREST
    shift = math.log1p(262144 * CLEAREST / (1 - CLEAREST))
    assert 17 < shift < 18  # nats, of logits within 30 either way


def test_labels_are_seen_as_clean_and_the_transition_keeps_its_signal(ours: diffusion_gemma.Gemma) -> None:
    """CRS converts each sample's distributions with its own share of labels: the dense distribution by hand is the backend's."""
    from limpet.diffusion import process

    path = open_context(ours, CounterRNG(SEED, torch.arange(3)), torch.full((3, CANVAS), -1), trace=True)
    sampler, shares = CRS(nfe=8, budget=4.0), set()
    state = sampler.begin(path)
    while state.call < sampler.nfe - 1:
        visible, before = sampler.visible(state), state
        state, info = stepped(sampler, path, before)
        share = visible.double().mean(-1)
        shares |= set(share.tolist())
        signal = path.signal(info.t)
        seen = (share + (1 - share) * signal).clamp(max=CLEAREST)
        logits = ours.head(state.made.values).double()  # type: ignore[union-attr]
        probs = process.leave_one_out(logits.softmax(-1), info.input, seen)
        assert torch.allclose(info.outcome.deficit, 1 - probs.amax(-1), atol=1e-5)
    assert len(shares) > 3


# Self-conditioning


def test_a_call_is_told_of_the_one_before_it(ours: diffusion_gemma.Gemma) -> None:
    """And the first of a path of none; a state that goes on along another path takes it there."""
    paths = [open_context(ours, CounterRNG(SEED, torch.arange(2)), torch.full((2, CANVAS), -1)) for _ in range(2)]
    sampler, state = Native(nfe=6), Native(nfe=6).begin(paths[0])
    made: list[Tensor] = []
    for _ in range(3):
        seen, before = state.tokens, state.made
        carried = None if before is None else ours.carry(ours.head(before.values).flatten(0, 1)).view(2, CANVAS, -1)
        state, _ = stepped(sampler, paths[0], state)
        assert torch.allclose(state.made.values, ours.body_carried(seen, 0.5, None, carried), atol=1e-5)  # type: ignore[union-attr]
        made.append(state.made.values)  # type: ignore[union-attr]
    assert (made[0] - made[1]).abs().max() > 0.1
    ends = [list(generate(sampler, path, state))[-1][0].tokens for path in paths]
    assert torch.equal(*ends)
    forgetful = list(generate(sampler, paths[0], state._replace(made=None)))[-1][0].tokens
    assert not torch.equal(ends[0], forgetful)


def test_pieces_change_nothing(ours: diffusion_gemma.Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    from limpet.diffusion import backends as steps

    whole = limpet.sample(ours, CRS(nfe=5), n=3).tokens
    monkeypatch.setitem(steps.PIECE, "cpu", 5 * ours.vocab_size)
    assert torch.equal(limpet.sample(ours, CRS(nfe=5), n=3).tokens, whole)


# Canvases


def test_the_first_canvas_is_what_sample_makes(ours: diffusion_gemma.Gemma) -> None:
    for sampler in (CRS(nfe=5), Mend(nfe=5), EntropyBound(nfe=5, probs="predicted")):
        prompt = ours.prompt("Why is the sky blue?")
        out = reply(ours, sampler, 3, length=CANVAS, prompt="Why is the sky blue?")
        canvas = limpet.sample(ours.after(torch.tensor([prompt])), sampler, 3)
        assert torch.equal(out.tokens, ended(canvas.tokens, ours.ends, ours.pad)[0])
        assert torch.equal(out.committed, canvas.committed)
        assert out.nfe == canvas.nfe == 5


@pytest.mark.parametrize("name", samplers.available())
def test_every_sampler_replies_and_a_reply_knows_no_company(ours: diffusion_gemma.Gemma, name: str) -> None:
    """Over two canvases; guidance needs given tokens, which a canvas has none of."""
    sampler = samplers.parse(name, nfe=6)[1]
    if sampler.needs_given:
        with pytest.raises(LimpetError, match="nothing to guide by"):
            reply(ours, sampler, 2, length=2 * CANVAS, prompt=[2, 40, 41])
        return
    out = reply(ours, sampler, 4, length=2 * CANVAS, prompt=[2, 40, 41])
    alone = reply(ours, sampler, 2, length=2 * CANVAS, prompt=[2, 40, 41], batch_size=1, first=1)
    assert (out.tokens[1:3, : alone.tokens.shape[1]] != alone.tokens).double().mean() < 0.1  # draws that round apart
    assert out.nfe <= 12
    assert len(out.texts) == 4


def test_a_text_ends_once_and_is_padded() -> None:
    canvas = torch.tensor([[5, 6, 7, 8], [5, 1, 7, 1], [3, 3, 4, 4], [5, 6, 7, 1]])
    padded, goes_on = ended(canvas, (1, 3), 0)
    assert padded.tolist() == [[5, 6, 7, 8], [5, 1, 0, 0], [3, 0, 0, 0], [5, 6, 7, 1]]
    assert goes_on.tolist() == [True, False, False, False]


def test_canvases_have_seeds_of_their_own() -> None:
    seeds = [canvas_seed(seed, canvas) for seed in (0, 8200, 2**64 - 1) for canvas in range(50)]
    assert len(set(seeds)) == 150
    assert canvas_seed(8200, 0) == 8200
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_rows_that_have_ended_cost_nothing(ours: diffusion_gemma.Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the batch, and the last to go on is as it would be alone."""
    sizes: list[int] = []
    body = diffusion_gemma.Gemma.body_carried
    monkeypatch.setattr(
        diffusion_gemma.Gemma, "body_carried", lambda self, *told: sizes.append(len(told[0])) or body(self, *told)
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
    given = ["--model", str(folder), "--prompt", "Why?", "--n", "2", "--device", "cpu", "--precision", "float32"]
    for arm in ("crs nfe=4", "mend nfe=4", "entropy-bound nfe=4 distribution=predicted"):
        assert main.main(["sample", *given, "--sampler", arm, "--length", "32", "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        model = load(folder, device="cpu")
        assert isinstance(model, diffusion_gemma.Gemma)
        expected = reply(model, samplers.parse(arm)[1], 2, length=32, prompt="Why?")
        assert [row["tokens"] for row in rows] == expected.tokens.tolist()


def test_a_path_is_recorded_as_it_is_sampled(folder: Path, tmp_path: Path, ours: diffusion_gemma.Gemma) -> None:
    """A canvas after nothing, told of each call before; of a reply's canvases there is no one record."""
    record = tmp_path / "x.limpet"
    given = [
        "sample",
        "--model",
        str(folder),
        "--n",
        "1",
        "--device",
        "cpu",
        "--precision",
        "float32",
        "--record",
        str(record),
    ]
    for arm, sampler in (("mend nfe=4", Mend(nfe=4)), ("entropy-bound nfe=4", EntropyBound(nfe=4))):
        assert main.main([*given, "--sampler", arm]) == 0
        expected = limpet.sample(ours, sampler, n=1).tokens[0]
        assert Trajectory.load(record).frames[-1].state.tolist() == expected.tolist()
    assert main.main([*given, "--prompt", "Why?"]) == 2


# Conformance


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_conformance(folder: Path, precision: str) -> None:
    model = load(folder, device="cpu", precision=precision)
    rows = rows_of(model, "crs", "entropy-bound distribution=predicted")
    assert not failed(rows)
    assert conformance.verdict(model, rows).endswith("0 failed")


@pytest.mark.long
@pytest.mark.parametrize("name", samplers.available())
def test_every_sampler_keeps_the_contract_on_it(ours: diffusion_gemma.Gemma, name: str) -> None:
    assert not failed(list(conformance.arm_rows(ours, name, nfe=6)))


def test_prefixes_hold_and_calls_are_counted(ours: diffusion_gemma.Gemma) -> None:
    for sampler in (Native(nfe=5), CRS(nfe=5), Mend(nfe=5)):
        out = limpet.sample(ours, sampler, n=3, prompt="The ", seed=3)
        prefix = ours.tokenizer.encode("The ")  # type: ignore[union-attr]
        assert (out.tokens[:, : len(prefix)] == torch.tensor(prefix)).all()
        assert out.nfe == 5


def test_a_context_is_of_as_many_samples_as_it_was_told(ours: diffusion_gemma.Gemma) -> None:
    with pytest.raises(LimpetError, match="told what stands before 2 samples, and is asked of 3"):
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
    said = json.loads((copy / "config.json").read_text())
    said["text_config"] |= text
    (copy / "config.json").write_text(json.dumps(said | (config or {})))
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
def test_settings_that_are_none(folder: Path, tmp_path: Path, text: dict[str, Any], match: str) -> None:
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
def test_a_config_that_is_none(folder: Path, tmp_path: Path, config: dict[str, Any], match: str) -> None:
    refused(changed(folder, tmp_path, config), match)


def test_settings_of_strangers_are_not_passed_on(folder: Path, tmp_path: Path, ours: diffusion_gemma.Gemma) -> None:
    """Code, kernels and devices that a config may name reach nobody."""
    strange = {"auto_map": {"AutoModel": "evil--code.Evil"}, "_attn_implementation": "evil/kernels",
               "quantization_config": {"quant_method": "evil"}}  # fmt: skip
    copy = changed(folder, tmp_path, strange, _attn_implementation="evil/kernels", dtype="evil")
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/base"}')
    model = load(copy, device="cpu")
    assert isinstance(model, diffusion_gemma.Gemma)
    assert model.digest == ours.digest
    assert model.network.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("spoil", ["torn", "missing", "unexpected", "nan", "shape", "kind"])
def test_weights_that_are_none(folder: Path, tmp_path: Path, spoil: str) -> None:
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
def test_a_template_that_is_none_is_one_sentence(folder: Path, tmp_path: Path, template: str) -> None:
    copy = changed(folder, tmp_path)
    (copy / "chat_template.jinja").write_text(template)
    model = load(copy, device="cpu")
    with pytest.raises(LimpetError, match=r"chat template of .* cannot be filled in"):
        model.prompt("Why?")  # type: ignore[attr-defined]


def test_a_model_without_a_template_is_told_the_text(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path)
    (copy / "chat_template.jinja").unlink()
    model = load(copy, device="cpu")
    assert model.prompt("Why?") == [2, *model.tokenizer.encode("Why?")]  # type: ignore[attr-defined, union-attr]
    (copy / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}say {{ messages[0].content }}"})
    )
    said = load(copy, device="cpu").prompt("Why?")  # type: ignore[attr-defined]
    assert model.tokenizer.decode(said) == "<bos>say Why?"  # type: ignore[union-attr]


def test_an_older_transformers_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion_gemma, "extra", lambda *_: type("Old", (), {"__version__": "5.0"}))
    refused(folder, "transformers 5.0 does not know DiffusionGemma: install 5.22 or later")
