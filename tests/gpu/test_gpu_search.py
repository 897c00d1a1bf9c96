"""Guided search, scores of reward models and models of transformers on a GPU, in float32 compared with the CPU."""

import pytest
import torch
from precision import FLOAT32, check
from support.helpers import tiny_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, OPTConfig, OPTForCausalLM

from nlgrpo.engine import transformers_backend
from nlgrpo.engine.backends import engine_of
from nlgrpo.engine.chunked_decoding import ImplicitReward, ModelValue
from nlgrpo.engine.generation import RolloutRequest
from nlgrpo.engine.guided_search import Search, search
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder
from nlgrpo.model.packing import pack_pairs
from nlgrpo.model.reward_model import scores, with_score_head
from nlgrpo.rewards.classifiers import Classifier

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
SAMPLING = Sampling(max_new_tokens=8, stop_ids=(2, 20, 21, 22))
SEARCHES = {
    "chunks": Search(beams=2, successors=2, chunk=3),
    "sampled beams": Search(beams=2, successors=3, chunk=4, temperature=0.5),
    "likeliest": Search(beams=1, successors=3, chunk=1, likeliest=True),
    "softmax": Search(beams=2, successors=2, chunk=3, softmax=True),
}


def random_like(x, seed):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)


def value_model(folder, device, seed):
    model = with_score_head(decoder.load(folder)).float()
    with torch.no_grad():
        model.head.weight.copy_(random_like(model.head.weight, seed))
    return model.to(device)


def searched(models, device, how):
    """Tokens of the candidates, and their values."""
    policy = decoder.load(models("qwen3"), device=device)
    valued = [
        (ModelValue("own", value_model(models("llama"), device, 0), 8), 1.0),
        (ImplicitReward("pair", decoder.load(models("qwen2"), device=device), policy, 8), 2.0),
    ]
    found, _ = search(policy, PROMPTS, how, SAMPLING, valued, seed=3, valued=True)
    flat = [candidate for group in found for candidate in group]
    return [candidate.tokens for candidate in flat], torch.tensor([candidate.value for candidate in flat])


@pytest.mark.parametrize("name", SEARCHES)
def test_guided_search(gpu, models, name):
    tokens, values = searched(models, gpu, SEARCHES[name])
    expected, truth = searched(models, "cpu", SEARCHES[name])
    assert tokens == expected
    check(values, truth, 5e-5, planted=1.01 * truth)


# --- reward models ----------------------------------------------------------------------------------------------------


def pair_scores(models, device, seed=0):
    model = value_model(models("llama"), device, seed)
    texts = [[5, 6, 7, 8], [5, 6, 9], [10, 11, 12, 13, 14, 15], [10, 2]]
    (batch,) = pack_pairs(texts[0::2], texts[1::2], range(2), 100, 0, device=device)
    with torch.no_grad():
        return torch.stack(scores(model, batch))


def test_scores_of_pairs(gpu, models):
    check(pair_scores(models, gpu), pair_scores(models, "cpu"), FLOAT32, planted=1.01 * pair_scores(models, "cpu"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A reward model of transformers with random weights, and its tokenizer."""
    folder = tmp_path_factory.mktemp("classifier")
    tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=32, num_attention_heads=4, num_labels=1, **sizes, **ids)
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.3 * random_like(parameter, number) + float(parameter.dim() == 1))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_classifier(gpu, classifier):
    prompts, completions = ["w1 w2", "w3", "w4 w5 w6", ""], [" w7", " w8 w9 w10", " w1", " w2 w3"]

    def on(device, given=completions):
        return torch.tensor(Classifier(str(classifier), device=str(device), batch_size=3)(prompts, given))

    check(on(gpu), on("cpu"), FLOAT32, planted=on("cpu", [" w7", " w8 w9", " w1", " w2 w3"]))


# --- a model of transformers as the engine ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """A model that the decoder does not support."""
    folder = tmp_path_factory.mktemp("opt")
    config = OPTConfig(
        vocab_size=32, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.3 * random_like(parameter, number) + float(parameter.dim() == 1))
    model.save_pretrained(folder)
    return folder


def test_a_model_of_transformers(gpu_or_cpu, opt):
    def on(device, temperature=0.9):
        model = transformers_backend.load_frozen(opt, device=device)
        sampling = Sampling(max_new_tokens=10, stop_ids=(2, 3, 4), temperature=temperature)
        rollout = engine_of(model).generate(RolloutRequest(PROMPTS, 3, sampling, seed=1))
        return rollout.tokens.cpu(), rollout.logprobs.cpu()

    found, truth = on(gpu_or_cpu), on("cpu")
    assert torch.equal(found[0], truth[0])
    other = on("cpu", 0.91)[1]
    check(found[1], truth[1], FLOAT32, planted=other if other.shape == truth[1].shape else 1.01 * truth[1])
