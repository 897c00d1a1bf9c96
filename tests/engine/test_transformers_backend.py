"""Models that the decoder does not support, compared with a loop over transformers without padding or cache."""

import json

import pytest
import torch
from support.helpers import EOS, WORDS, tiny_model
from support.search_truths import best_by_brute_force
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPTNeoConfig,
    MptConfig,
    OPTConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from nlgrpo import cli
from nlgrpo.engine import guided_search, transformers_backend
from nlgrpo.engine.backends import engine_of
from nlgrpo.engine.chunked_decoding import ModelValue
from nlgrpo.engine.generation import RolloutRequest, generate
from nlgrpo.engine.guided_search import Search
from nlgrpo.engine.sampling import Sampling, draw, log_distribution, uniform_noise
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.model import decoder, reward_model

pytestmark = pytest.mark.usefixtures("one_thread")

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
CONFIGS = {
    "opt": OPTConfig(
        vocab_size=len(WORDS), hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, **SPECIAL,
    ),
    "bloom": BloomConfig(vocab_size=len(WORDS), hidden_size=32, n_layer=2, n_head=4, **SPECIAL),
    "gpt_neo": GPTNeoConfig(
        vocab_size=len(WORDS), hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]], window_size=4, **SPECIAL,
    ),
    "recurrent_gemma": RecurrentGemmaConfig(  # padding would change its recurrent state
        vocab_size=len(WORDS), hidden_size=32, lru_width=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=48, attention_window_size=4, **SPECIAL,
    ),
}  # fmt: skip
PROMPTS = ["w1 w2", "w3", "w4 w5 w6 w7 w8"]


@pytest.fixture(scope="module", params=CONFIGS)
def work(request, tmp_path_factory):
    """A frozen model of another family, and a value model of a family that the decoder supports."""
    root = tmp_path_factory.mktemp(request.param)
    tiny_model(root / "base", "llama", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(root / "base")
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + float(parameter.dim() == 1))
    model.save_pretrained(root / "policy")
    tokenizer.save_pretrained(root / "policy")
    value, _ = reward_model.load_reward_model(str(root / "base"), seed=0)
    with torch.no_grad():
        value.head.weight.mul_(5.0)
    reward_model.save(value, root / "value", tokenizer=tokenizer, pad=0, max_length=64)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (root / "rewards.py").write_text(
        "def low(completion_ids, **_):\n    return [float(ids[0] % 7) for ids in completion_ids]\n"
    )
    return root


def by_hand(theirs, ids, sampling, seed, index, place):
    """Tokens and log-probs of one sample; each forward pass reads the whole sequence."""
    tokens, logps = [], []
    while len(tokens) < sampling.max_new_tokens and not (tokens and tokens[-1] in sampling.stop_ids):
        with torch.no_grad():
            logp = log_distribution(theirs(torch.tensor([[*ids, *tokens]])).logits[:, -1], sampling)
        noise = uniform_noise(seed, torch.tensor([index]), torch.tensor([place]), torch.tensor([len(tokens)]))[:, 0]
        tokens.append(int(draw(logp, noise)))
        logps.append(float(logp[0, tokens[-1]]))
    return tokens, logps


def read(work):
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    theirs = AutoModelForCausalLM.from_pretrained(work / "policy").eval()
    ours = transformers_backend.load_frozen(work / "policy")
    assert isinstance(ours, TransformersModel)
    return ours, theirs, tokenizer, [tokenizer(text).input_ids for text in PROMPTS]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("max_rows", [256, 4])
def test_samples_equal_the_loop_over_transformers(work, max_rows):
    ours, theirs, _, ids = read(work)
    sampling = Sampling(max_new_tokens=7, stop_ids=(EOS, 20, 21), temperature=0.8, top_k=20)
    first = [0, 2, 1]
    request = RolloutRequest(ids, 3, sampling, seed=5, index=[4, 9, 2], max_rows=max_rows, first_sample=first)
    rollout = ours.generate(request)
    completions = rollout.completion_ids()
    for p, prompt in enumerate(ids):
        for m in range(3):
            tokens, logps = by_hand(theirs, prompt, sampling, 5, [4, 9, 2][p], first[p] + m)
            assert completions[3 * p + m] == tokens
            assert rollout.logprobs[p, m, : len(tokens)].tolist() == pytest.approx(logps, abs=1e-4)
            assert bool(rollout.finished[p, m]) == (tokens[-1] in sampling.stop_ids)
    assert len(set(map(len, completions))) > 1


@pytest.mark.sampled(3)
def test_a_search_equals_algorithms_4_and_5_by_hand(work):
    """The value model is a decoder."""
    ours, theirs, _, ids = read(work)
    model, _ = reward_model.load_reward_model(str(work / "value"))
    how, sampling = Search(2, 3, 2), Sampling(max_new_tokens=6, stop_ids=(EOS, 20, 21))
    found, cost = guided_search.search(ours, ids, how, sampling, [(ModelValue("value", model, 6), 0.5)], seed=3)
    tokens = 0
    for p, prompt in enumerate(ids):
        beams, successors, length = [[]], how.candidates, 0
        while True:
            length = min(length + how.chunk, sampling.max_new_tokens)
            candidates = [beam for beam in beams if beam and beam[-1] in sampling.stop_ids]
            for k, beam in enumerate(beams):
                for b in range(successors if beam not in candidates else 0):
                    child = list(beam)
                    while len(child) < length and not (child[len(beam) :] and child[-1] in sampling.stop_ids):
                        with torch.no_grad():
                            logp = log_distribution(theirs(torch.tensor([[*prompt, *child]])).logits[:, -1], sampling)
                        place, position = torch.tensor([k * successors + b]), torch.tensor([len(child)])
                        child.append(int(draw(logp, uniform_noise(3, torch.tensor([p]), place, position)[:, 0])))
                        tokens += 1
                    candidates.append(child)
            successors = how.successors
            if all(len(y) == sampling.max_new_tokens or y[-1] in sampling.stop_ids for y in candidates):
                break
            with torch.no_grad():
                values = [
                    float(model(torch.tensor([*prompt, *y]), [len(prompt) + len(y)])[-1, 0]) / 0.5 for y in candidates
                ]
            beams = best_by_brute_force(candidates, values, how)
        assert sorted(list(one.tokens) for one in found[p]) == sorted(candidates)
    assert cost.tokens == tokens
    assert cost.cache_bytes > 0  # of the value model


def test_chunks_of_full_length_are_plain_samples(work):
    ours, _, _, ids = read(work)
    sampling = Sampling(max_new_tokens=5, stop_ids=(EOS,))
    found, _ = guided_search.search(ours, ids, Search(2, 2, 5), sampling, [], seed=1)
    samples = engine_of(ours).generate(RolloutRequest(ids, 4, sampling, seed=1)).completion_ids()
    assert [list(one.tokens) for candidates in found for one in candidates] == samples


def test_a_model_that_loses_its_state_between_steps_is_refused(tmp_path, capsys):
    """RWKV's `generate` in transformers differs from its forward pass."""
    tiny_model(tmp_path, "llama")  # for the tokenizer
    config = RwkvConfig(vocab_size=len(WORDS), hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, **SPECIAL)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path)
    assert cli.main(["generate", "w1", f"--model={tmp_path}"]) == 2
    assert "cannot be sampled: log-probs of transformers' generate differ by" in capsys.readouterr().err


def test_float64_models_are_sampled_from_float32_logits(work):
    """transformers' `generate` samples from float32 logits."""
    ours, theirs = (
        transformers_backend.load_frozen(work / "policy", dtype=torch.float64),
        AutoModelForCausalLM.from_pretrained(work / "policy"),
    )
    prompts, sampling = [[3, 4, 5], [6, 7]], Sampling(max_new_tokens=4)
    rollout = ours.generate(RolloutRequest(prompts, 2, sampling, seed=1))
    for p, prompt in enumerate(prompts):
        tokens, logps = by_hand(theirs.eval(), prompt, sampling, 1, p, 1)
        assert rollout.tokens[p, 1].tolist() == tokens
        assert rollout.logprobs[p, 1].tolist() == pytest.approx(logps, abs=1e-4)


def test_the_context_of_mpt_has_another_key():
    assert transformers_backend.ConfigLimits.of(MptConfig(max_seq_len=64)).context == 64


def test_a_supported_family_uses_the_decoder(tmp_path):
    tiny_model(tmp_path, "llama")
    assert isinstance(transformers_backend.load_frozen(tmp_path), decoder.Decoder)
    assert transformers_backend.note(tmp_path) == ""
    theirs = TransformersModel(AutoModelForCausalLM.from_pretrained(tmp_path))
    prompts, sampling = [[3, 4], [5, 6, 7]], Sampling(max_new_tokens=6)
    ours = generate(transformers_backend.load_frozen(tmp_path), prompts, 3, sampling, seed=2)
    assert theirs.generate(RolloutRequest(prompts, 3, sampling, seed=2)).completion_ids() == ours.completion_ids()
    assert theirs.shape.context == decoder.load(tmp_path).shape.context


def test_limits_of_context_and_vocabulary(work):
    ours, _, _, ids = read(work)
    with pytest.raises(ValueError, match="outside"):
        ours.generate(RolloutRequest([[len(WORDS)]], 1, Sampling(max_new_tokens=2)))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        guided_search.search(ours, [ids[0], []], Search(1, 1, 1), Sampling(max_new_tokens=2), [])
    with pytest.raises(ValueError, match="samples = 0"):
        ours.generate(RolloutRequest(ids, 0, Sampling(max_new_tokens=2)))
    if ours.shape.context < transformers_backend.UNBOUNDED:
        with pytest.raises(ValueError, match="the model's context of 64"):
            ours.generate(RolloutRequest(ids, 1, Sampling(max_new_tokens=64)))


@pytest.mark.sampled(2)
def test_the_commands(work, capsys):
    note = f"; transformers runs it, which is slower (unknown architecture {work.name.rstrip('0')!r}"
    arguments = ["w1 w2", f"--model={work / 'policy'}", f"--guide={work / 'value'}", "--max-new-tokens=6", "--chunk=2"]
    assert cli.main(["generate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(note) == 1
    assert json.loads(captured.out)["prompt"] == "w1 w2"
    settings = {
        "model.path": work / "policy",
        "data.source": work / "prompts.jsonl",
        "rollout.max_new_tokens": 6,
        "rewards.low.function": f"{work / 'rewards.py'}:low",
        "evaluation.prompts": 1,
        "chunk": 2,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    learn = ["--iterations=1", "--beams=2", "--successors=2", "--no-compress", "--value.epochs=1", "--value.held-out=0"]
    start = [f"--value.path={work / 'value'}", f"--out={work / 'iro'}"]
    assert cli.main(["iro", "blank", *options, *learn, f"--out={work / 'iro'}"]) == 2
    assert "a value model cannot start from" in capsys.readouterr().err
    assert not (work / "iro").exists()
    assert cli.main(["iro", "blank", *options, *learn, *start]) == 0
    assert note in " ".join(capsys.readouterr().out.split())
    assert cli.main(["decode", "blank", *options, f"--guide={work / 'iro'}", "--budgets=4", f"--out={work / 'd'}"]) == 0
    bon, iro = json.loads((work / "d" / "decode.json").read_text())
    assert (bon["queries"], iro["queries"] > 0) == (0, True)


def test_an_architecture_that_transformers_does_not_support_is_refused(tmp_path, capsys):
    tiny_model(tmp_path, "gpt2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    assert cli.main(["generate", "w1", f"--model={tmp_path}"]) == 2
    assert "unheard_of" in capsys.readouterr().err
