"""Options of ``nlgrpo generate`` and ``serve``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from nlgrpo.config.schema import Table
from nlgrpo.errors import UserError

# how a response is chosen, besides by a reward
VALUE = "value"
MAJORITY = "majority"


@dataclass
class ResponderOptions:
    """Model, sampling and inference-time procedure."""

    model: str = "story-lm"
    """A Hugging Face directory or hub name, the `model` folder of a run, or the embedded "story-lm", "maze-lm" or
    "numbers-lm"."""
    procedure: str | None = None
    """Inference-time procedure: bon:N, wor:N, soft:TAU:N, maj:N, or rewind:QUANTILE:N (sample until a reward reaches
    this quantile of the reference's rewards, at most N times)."""
    choose: str | None = None
    """How the response is chosen among the candidates: by a reward, written as in a configuration:
    "lexicon(path='vader_lexicon.txt')"; by the "majority" of final answers; in a guided search also by "value", its
    default. With maj:N, a reward extracts the final answers: "gsm8k()"."""
    timeout: float = 600.0
    """Timeout of one call of the reward, in seconds."""
    max_new_tokens: int | None = None
    """Maximum number of tokens of a completion. None: as in the training of the model, else 128."""
    temperature: float | None = None
    """Sampling temperature. 0: greedy decoding. None: as in the training of the model, else 1."""
    top_k: int | None = None
    """Sample from the k most likely tokens. 0 or -1: all. None: as in the training of the model, else all."""
    top_p: float | None = None
    """Sample from the most likely tokens that have this total probability. None: as in the training of the model, else
    1."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the probability of the most likely token. None: as in the
    training of the model, else 0."""
    as_trained: bool = True
    """Sample and prompt as in the training of the model, where no option says otherwise: the export of a run has its
    temperature, filters, number of tokens, system prompt and chat options in nlgrpo.json."""
    seed: int = 0
    """Random seed: the same seed gives the same completions."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute dtype. auto: bfloat16 on a GPU, float32 on a CPU."""
    max_rows: int = 256
    """Maximum number of completions that are decoded together; it limits memory."""
    engine: Literal["nlgrpo", "vllm"] = "nlgrpo"
    """Engine that samples: nlgrpo's own, or vLLM. Guided search needs nlgrpo's."""
    guide: tuple[Path, ...] = ()
    """Decode by guided search: value models of `nlgrpo value` (folders of runs), or the folder of `nlgrpo iro`."""
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
    reference: str | None = None
    """Model whose rewards give the threshold of rewind. None: the model itself."""
    reference_samples: int = 64
    """Samples of the reference per prompt, for the threshold of rewind."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed = {self.seed}: expected a number in [0, 2^63)")
        if self.max_rows < 1:
            raise UserError(f"max_rows = {self.max_rows}: expected at least 1")
        of_search = ("betas", "beams", "successors", "chunk", "search_temperature")
        given = [name for name in of_search if getattr(self, name) not in (None, ())] + ["diverse"] * (not self.diverse)
        if self.choose == VALUE:
            given.append("choose value")
        if given and not self.guide:
            raise UserError(f"{', '.join(given)}: only for guided search; name value models with --guide")
        if self.guide and self.procedure is not None:
            raise UserError(f"procedure {self.procedure!r}: guided search is a procedure of its own; omit one of them")
        if self.guide and self.engine != "nlgrpo":
            raise UserError(f"engine {self.engine!r}: guided search needs the engine 'nlgrpo'")
        if self.reference is not None and not (self.procedure or "").startswith("rewind"):
            raise UserError("reference: only for the procedure rewind")


@dataclass
class Generate(ResponderOptions):
    """Generate completions with a model."""

    prompts: Positional[tuple[str, ...]] = ()
    """Prompts: texts to continue, or conversations as JSON lists of messages."""
    source: str | None = None
    """Prompts of a file or data set, as `data.source` of a configuration; rewards get its columns."""
    split: str = "train"
    """Split of a data set."""
    prompt_column: str = "prompt"
    """Column of the texts or conversations."""
    template: str = "{prompt}"
    """Text with columns in braces: "Question: {question}\\nAnswer:"."""
    limit: int | None = None
    """Maximum number of prompts of the source."""
    chat: bool = False
    """Make a conversation of one user message from each prompt that is a text."""
    system_prompt: str | None = None
    """System message of conversations that have none. Prompts that are texts become user messages after it. None: as in
    the training of the model, else none; an empty text: none."""
    chat_template_kwargs: Table = field(default_factory=dict)
    """Arguments of the chat template: '{"enable_thinking": false}'. They replace those of the training of the model."""
    tools: tuple[str, ...] = ()
    """Tools in the chat template: .json files of schemas, or functions, `file.py:function`. They replace those of the
    training of the model."""
    samples: int | None = None
    """Completions per prompt, 1 by default. With --choose, or a procedure without a number: the number of candidates
    of which one is printed."""
    stop: tuple[str, ...] = ()
    """Cut completions off before the first of these strings."""
    candidates: bool = False
    """Add all candidates and their scores to the JSON objects."""
    json: bool = False
    """Print one JSON object per completion: prompt, text, token ids, log-probs, finish reason, score."""
    out: Path | None = None
    """Write the JSON objects into this file, one per line. A stopped command resumes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prompts) == (self.source is not None):
            given = "prompts and --source; give one of them" if self.prompts else "no prompt; give one or more texts"
            raise UserError(f'{given}, such as: nlgrpo generate "Once upon a time"')
        if self.samples is not None and not 1 <= self.samples < 2**31:
            raise UserError(f"samples = {self.samples}: expected a number in [1, 2^31)")
        if self.guide and self.samples not in (None, 1):
            raise UserError(f"samples = {self.samples}: guided search gives one response per prompt")
        if self.candidates and not (self.json or self.out):
            raise UserError("candidates: only for JSON objects; add --json or --out FILE")
        if self.candidates and not self.chooses:
            raise UserError("candidates: nothing is chosen; name a --procedure, a reward with --choose, or a --guide")
        if any(not string for string in self.stop):
            raise UserError("stop: an empty string stops before the first token; leave it out")
        for name in ("split", "prompt_column", "template", "limit"):
            if self.prompts and getattr(self, name) != getattr(Generate, name):
                raise UserError(
                    f"--{name.replace('_', '-')} is for prompts of a --source, and these are texts; remove it"
                )

    @property
    def chooses(self) -> bool:
        """Whether one of several candidates is printed, instead of all samples."""
        return bool(self.guide) or self.procedure is not None or self.choose is not None


@dataclass
class Serve(ResponderOptions):
    """Serve a model through an inference-time procedure over OpenAI's HTTP protocol.

    ``temperature``, ``top_k``, ``top_p`` and ``min_p`` are the defaults of requests that do not set them, and
    ``max-new-tokens`` is also the most that a request may ask for.
    """

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0: all interfaces; set an API key then."""
    port: int = 8000
    """Port. 0: any free port."""
    name: str | None = None
    """Name of the model in the protocol. None: as --model."""
    api_key: str | None = None
    """Key that requests have to send. None: the environment variable NLGRPO_API_KEY, which other users of the machine
    do not see; without one, no key is needed."""
    max_queue: int = 256
    """Maximum number of waiting requests; more get status 429."""
    max_choices: int = 16
    """Maximum number of responses per request: its prompts times n."""
    max_body: int = 1 << 20
    """Maximum size of the body of a request, in bytes."""
    grace: float = 30.0
    """Seconds for the requests that have arrived when the server is stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_queue", "max_choices", "max_body"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: expected at least 1")
        if not 0 <= self.grace < float("inf"):
            raise UserError(f"grace = {self.grace}: expected a number of seconds >= 0")
        if self.api_key == "":
            raise UserError("api_key is empty; omit it to need no key")


def read_generate(arguments: Sequence[str]) -> Generate:
    return tyro.cli(Generate, args=list(arguments), prog="nlgrpo generate")


def read_serve(arguments: Sequence[str]) -> Serve:
    return tyro.cli(Serve, args=list(arguments), prog="nlgrpo serve")
