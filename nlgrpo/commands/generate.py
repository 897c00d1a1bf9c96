"""The command ``nlgrpo generate``: completions of prompts, by plain sampling or by guided search."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import tyro
from transformers import PreTrainedTokenizerBase
from tyro.conf import Positional

from nlgrpo.data import prompt_dataset
from nlgrpo.engine import transformers_backend
from nlgrpo.engine.guided_search import Search
from nlgrpo.engine.rollouts import guided_responses
from nlgrpo.engine.rollouts.sampler import decode
from nlgrpo.engine.sampling import Sampling
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.model import hf_weights
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.tokenizer import load_tokenizer, stop_ids_of


@dataclass
class Generate:
    """Generate completions with a model."""

    prompts: Positional[tuple[str, ...]]
    """Prompts: texts to continue."""
    model: str = "story-lm"
    """A Hugging Face directory or hub name, the `model` folder of a run, or the embedded "story-lm"."""
    samples: int = 1
    """Completions per prompt."""
    max_new_tokens: int = 128
    """Maximum number of tokens of a completion."""
    temperature: float = 1.0
    """Sampling temperature. 0: greedy decoding."""
    top_k: int = 0
    """Sample from the k most likely tokens. 0: all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that have this total probability."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the probability of the most likely token."""
    seed: int = 0
    """Random seed: the same seed gives the same completions."""
    json: bool = False
    """Print one JSON object per completion: prompt, text, token ids, log-probs, finish reason."""
    guide: tuple[Path, ...] = ()
    """Decode by guided search: value models of `nlgrpo value` (folders of runs), or the folder of `nlgrpo iro`. None:
    plain sampling."""
    betas: tuple[float, ...] = ()
    """beta_i of the value models, V = sum_i V_i / beta_i. None: those of the folder of `nlgrpo iro`, else 1 each."""
    beams: int | None = None
    """K, beams of the search. None: as in the folder of `nlgrpo iro`, else 4."""
    successors: int | None = None
    """B, chunks sampled after each beam. None: as in the folder of `nlgrpo iro`, else 4."""
    chunk: int | None = None
    """L, tokens per chunk. None: as in the folder of `nlgrpo iro`, else 16."""
    search_temperature: float | None = None
    """Above 0: sample beams in proportion to e^(V / temperature). 0: keep the best. None: as in the folder, else 0."""
    diverse: bool = True
    """Prefer distinct candidates, unless the search of the folder does not."""
    choose: str | None = None
    """How the response is chosen among the final candidates: the largest "value", the "majority" of final answers, or
    the largest reward, written as in a configuration: "lexicon(path='vader_lexicon.txt')". None: "value"."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError('no prompt; give one or more texts, such as: nlgrpo generate "Once upon a time"')
        if not 1 <= self.samples < 2**31:
            raise ValueError(f"samples = {self.samples}: expected a number in [1, 2^31)")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed}: expected a number in [0, 2^63)")
        if self.guide and self.samples != 1:
            raise ValueError(f"samples = {self.samples}: guided search gives one response per prompt")
        of_search = ("betas", "beams", "successors", "chunk", "search_temperature", "choose")
        given = [name for name in of_search if getattr(self, name) not in (None, ())] + ["diverse"] * (not self.diverse)
        if given and not self.guide:
            raise ValueError(f"{', '.join(given)}: only for guided search; name value models with --guide")

    @property
    def sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")}

    def search(self, learned: Search) -> Search:
        """Return the requested search, laid over the one that the values were learned with."""
        names = ("beams", "successors", "chunk")
        asked = {name: getattr(self, name) for name in names} | {"temperature": self.search_temperature}
        given = {name: value for name, value in asked.items() if value is not None}
        return replace(learned, **given, diverse=self.diverse and learned.diverse)


def generate(arguments: Sequence[str]) -> int:
    """Print each prompt with its completions, or one JSON object per line."""
    options = tyro.cli(Generate, args=list(arguments), prog="nlgrpo generate")
    source = hf_weights.locate(options.model)
    tokenizer = load_tokenizer(source)
    model = transformers_backend.load(source, device="cuda" if torch.cuda.is_available() else "cpu")
    if note := transformers_backend.note(source):
        print(f"{options.model}{note}", file=sys.stderr)
    sampling = Sampling(**options.sampling, stop_ids=tuple(stop_ids_of(tokenizer, source)))
    if options.guide:
        return _generate_guided(options, model, tokenizer, sampling)
    ids = prompt_dataset.encode(tokenizer, options.prompts)  # the engine refuses prompts that are too long
    rollout = transformers_backend.generator(model)(ids, options.samples, sampling, seed=options.seed)
    completions, reasons = rollout.completion_ids(), rollout.finish_reasons()
    texts = decode(tokenizer, [prompt for prompt in ids for _ in range(options.samples)], completions)
    logprobs = rollout.logprobs.flatten(0, 1).tolist()
    for i, (completion, text) in enumerate(zip(completions, texts, strict=True)):
        prompt = options.prompts[i // options.samples]
        if options.json:
            values = {"logprobs": logprobs[i][: len(completion)], "finish_reason": reasons[i]}
            print(json.dumps({"prompt": prompt, "text": text, "ids": completion} | values))
        else:
            print(f"{prompt}{text}\n    [{len(completion)} tokens, {reasons[i]}]")
    return 0


def _generate_guided(
    options: Generate, model: Decoder | TransformersModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> int:
    """Print the response of the guided search to each prompt, and the score that chose it."""
    of_policy = next(model.parameters())
    device = of_policy.device
    chooser = guided_responses.Chooser.of(options.choose or guided_responses.VALUE, device)
    learned = guided_responses.read_guide(options.guide[0]) if len(options.guide) == 1 else None
    paths, betas = (learned.values, options.betas or learned.betas) if learned else (options.guide, options.betas)
    how = options.search(learned.search if learned else Search())
    values = guided_responses.load_values(paths, betas, tokenizer, sampling, dtype=of_policy.dtype, device=device)
    for value, _ in values:
        if isinstance(value, guided_responses.TextValue):
            print(f"{value.name}{guided_responses.BY_TEXT}", file=sys.stderr)
    start = perf_counter()
    responses, cost = guided_responses.respond(
        model, tokenizer, options.prompts, how, sampling, values, chooser, seed=options.seed
    )
    for prompt, response in zip(options.prompts, responses, strict=True):
        one, reason = response.candidate, "stop" if response.candidate.finished else "length"
        if options.json:
            found = {"prompt": prompt, "text": response.text, "ids": list(one.tokens), "logprob": one.logprob}
            print(json.dumps(found | {"finish_reason": reason, chooser.how: response.score}))
        else:
            summary = f"{len(one.tokens)} tokens, {reason}; {chooser.how} {response.score:.4g}"
            print(f"{prompt}{response.text}\n    [{summary}]")
    speed = cost.tokens / max(perf_counter() - start, 1e-9)
    searched = f"{how.beams} beams x {how.successors} chunks of {how.chunk} tokens"
    if how.chunk >= sampling.max_new_tokens:
        searched += "; a chunk is a whole response, so no value guides"
    print(
        f"{searched}: {cost.tokens:,} tokens sampled, {cost.queries:,} value queries, {speed:,.0f} tokens/s",
        file=sys.stderr,
    )
    return 0
