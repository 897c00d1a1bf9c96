"""The reward ``reward_server`` with a reward model on a real vLLM server, against transformers in this process."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification
from vllm_processes import STORY

from nlgrpo.rewards.reward_functions import score
from nlgrpo.rewards.specs import load_reward

PROMPTS = ["Once upon a time", "The dog was", "", "A"]
ANSWERS = [" there was a cat.", " very happy and ran and ran.", "Yes!", " b"]


def scores_of(spec):
    scores = score([load_reward("r", spec)], prompts=PROMPTS, completions=ANSWERS, completion_ids=[[1]] * 4, columns={},
                   samples=4, step=0, total_steps=1)  # fmt: skip
    return scores.values["r"].flatten()


@pytest.mark.parametrize("labels", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_scores_are_those_of_transformers(serve, tmp_path, labels):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=160, initializer_range=0.1, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, num_labels=labels,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "rm")
    AutoTokenizer.from_pretrained(STORY).save_pretrained(tmp_path / "rm")
    server = serve(tmp_path / "rm", "--runner", "pooling", samples=False)
    which = "" if labels == 1 else ", label=2"
    for probability in (False, True):
        options = f"probability={probability}{which}"
        ours = scores_of(f"classifier(path='{tmp_path / 'rm'}', {options})")
        served = scores_of(f"reward_server(url='{server.url}', tokenizer='{tmp_path / 'rm'}', batch_size=3, {options})")
        torch.testing.assert_close(served, ours, rtol=0, atol=1e-5)
        assert ours.unique().numel() == 4
