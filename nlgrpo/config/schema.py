"""Configuration of a training run: nested dataclasses with a help text under each field, and TOML files over them."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import tyro

from nlgrpo.errors import UserError, did_you_mean, nearest
from nlgrpo.runtime.supervision.phases import TimeLimits
from nlgrpo.sections import Baseline, LoraConfig, ParallelConfig

if TYPE_CHECKING:
    from nlgrpo.kernels.reference import PolicyLossSettings

MINIMUM_WINDOW = 20  # values that a band of divergence.window needs
PATIENCE = 6  # times train.timeout, where a run waits for vLLM, environments and disks
LARGEST = 2**63  # numbers are below it, unless a bound is infinite
T = TypeVar("T")
AnyConfig = TypeVar("AnyConfig")  # a dataclass whose fields are sections

# in the metadata of a field
FREE = "free"
BOUND = "bound"


@dataclass(frozen=True)
class Bound:
    """The numbers that a key may have, finite ones within limits; of a list, all its numbers."""

    ge: float | None = None
    """It is at least this."""
    gt: float | None = None
    """It is greater than this."""
    le: float | None = None
    """It is at most this."""
    lt: float | None = None
    """It is less than this."""
    infinite: bool = False
    """It may be inf."""
    note: str = ""
    """What a number means that is not obvious, for messages."""

    def holds(self, number: float) -> bool:
        """Whether a number is within the limits; NaN is in none."""
        return (
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )

    def __str__(self) -> str:
        low = f"[{self.ge}" if self.gt is None else f"({self.gt}"
        if self.le is not None:
            return f"in {low}, {self.le}]"
        if self.lt is not None:
            return f"in {low}, {self.lt})"
        if self.gt is not None:
            return f"> {self.gt}"
        return "a finite number" if self.ge is None else f">= {self.ge}"


def bounded(default: T, **bound: Any) -> T:
    """Return a field with this default and a `Bound`. A default of None is allowed too."""
    found: T = field(default=default, metadata={BOUND: Bound(**bound)})
    return found


def free(default: T, **bound: Any) -> T:
    """Return a field with this default that may differ when a run resumes: it does not change what is trained.

    With arguments it has a `Bound` too.
    """
    metadata: dict[str, Any] = {FREE: True}
    if bound:
        metadata[BOUND] = Bound(**bound)
    found: T = field(default=default, metadata=metadata)
    return found


def out_of_bounds(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, what is allowed) of the keys of ``config``, and of its sections, that break their bound."""
    for key in dataclasses.fields(config):
        value = getattr(config, key.name)
        if dataclasses.is_dataclass(value):
            for name, number, allowed in out_of_bounds(value):
                yield f"{key.name}.{name}", number, allowed
        bound = key.metadata.get(BOUND)
        if bound is None or value is None:
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        within = all(map(bound.holds, numbers))
        if within and (bound.infinite or all(abs(number) < LARGEST for number in numbers)):
            continue
        allowed = str(bound)
        if key.default is None:
            allowed += " or none"
        if bound.note or bound.infinite:
            allowed += f" ({bound.note or 'inf: no limit'})"
        if within:
            allowed += ", and below 2^63"
        yield key.name, value, allowed


def _table(words: Sequence[str]) -> dict[str, Any]:
    """Read a table from the command line."""
    value = json.loads(words[0])
    if not isinstance(value, dict):
        raise UserError("expected a JSON object")
    return value


Table = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_table,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]
"""A table with any keys: in TOML ``{key = value}``, on the command line ``'{"key": value}'``."""


@dataclass
class DataConfig:
    source: str = "story-prompts"
    """A .jsonl, .json, .parquet, .csv or .txt file (.gz too), a `datasets` name, or the embedded "story-prompts"."""
    mixture: Table = field(default_factory=dict)
    """Several sources and their weights, instead of `source`: {"math.jsonl" = 3, "chat.jsonl" = 1}. In place of a
    weight, a table can set other keys of this section: {weight = 3, prompt_column = "problem"}."""
    streaming: bool = False
    """Read the prompts while the run visits them, for sources that are too large for memory."""
    shuffle_buffer: int = bounded(10_000, ge=1)
    """Streaming only: number of examples among which the next one is drawn, instead of shuffling all."""
    evaluation: str = ""
    """Evaluation prompts, in the same formats as `source`. Empty: the last prompts of `source` are held out. Training
    prompts that are also evaluation prompts are dropped. The evaluation prompts are the same for every seed."""
    split: str = "train"
    """Split of a `datasets` name or folder."""
    evaluation_split: str = ""
    """Split of `evaluation`. Empty: the same as `split`."""
    prompt_column: str = "prompt"
    """Column with a text, or with a conversation (a list of messages, or its JSON) for the model's chat template."""
    template: str = "{prompt}"
    """Template that builds the prompt from columns, such as "Question: {question}\\nAnswer:"."""
    cut_after: str | None = None
    """Cut the prompt after the last occurrence of this text, such as "\\n\\nAssistant:"."""
    separator: str | None = None
    """Text that separates documents in a plain text file. None: one document per line."""
    first_words: int | None = bounded(None, ge=1, lt=2**31)
    """Keep only this many words of the prompt column."""
    limit: int | None = bounded(None, ge=1)
    """Read only this many examples."""
    max_prompt_tokens: int | None = bounded(None, ge=1)
    """Drop longer prompts. None: drop prompts that leave no room for a completion in the context."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch."""
    add_bos: bool | None = None
    """Start each prompt with BOS, once. None: as the tokenizer does."""
    system_prompt: str | None = None
    """System message of conversations that have none. A prompt that is a text becomes the user's message after it."""
    chat: bool = False
    """Make a conversation of one user message from each prompt that is a text."""
    chat_template_kwargs: Table = field(default_factory=dict)
    """Arguments of the chat template: {enable_thinking = false}. A column of this name replaces them per example."""
    tools: tuple[str, ...] = ()
    """Tools in the chat template: .json files of schemas, or functions, `file.py:function`. A column `tools` adds
    others per example."""


@dataclass
class EnvironmentConfig:
    """An environment of the library `verifiers`: conversations in which it answers the policy, and rates it."""

    id: str = ""
    """Name of an installed environment, as for `verifiers.load_environment`. It gives the prompts, instead of
    `data.source`; the reward `environment()` is its own. rollout.max_new_tokens limits each answer of the policy."""
    args: Table = field(default_factory=dict)
    """Arguments of the environment: {max_turns = 2}."""
    renderer: Table = field(default_factory=dict)
    """Options of the library `renderers`, which turns messages into tokens: {name = "qwen3"}. Without a name: that of a
    model it knows, else the model's chat template, and {tool_parser = "qwen3"} reads tool calls."""
    max_tokens: int | None = bounded(None, ge=1)
    """Maximum number of tokens of a whole conversation. None: the context of the model."""
    retries: int = bounded(0, ge=0)
    """How often a conversation is repeated whose environment fails for a reason that `verifiers` calls temporary."""
    timeout: float = bounded(600.0, gt=0)
    """Seconds after which an environment that does nothing counts as hung, and the run stops."""


@dataclass
class OptimConfig:
    algorithm: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the weight matrices of the blocks and AdamW for all other parameters (embeddings, head, norms,
    biases, scalar heads). TRL and transformers call this key `optim`."""
    lr: float = bounded(1e-6, ge=0)
    """Learning rate of all parameters. With Muon too, if adjust_lr_fn is match_rms_adamw."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after the warm-up."""
    warmup_steps: int = bounded(0, ge=0)
    """Training steps over which the learning rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = bounded(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = bounded(0.0, ge=0)
    """Decoupled weight decay of AdamW and Muon; none for norms and biases."""
    max_grad_norm: float = bounded(1.0, ge=0, note="0: never clipped")
    """Maximum gradient norm, by clipping. 0: no clipping."""
    skip_grad_norm: float | None = bounded(None, gt=0)
    """Leave out an optimizer step whose gradient norm, before clipping, is above this number or not finite. None: no
    step is left out; a norm that is not finite ends the run."""
    momentum: float = bounded(0.95, ge=0, lt=1)
    """Muon's momentum."""
    nesterov: bool = True
    """Muon's Nesterov momentum."""
    ns_steps: int = bounded(5, ge=1, le=99)
    """Newton-Schulz iterations with which Muon orthogonalizes a matrix."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of Muon's learning rate for a matrix (A, B), as in torch.optim.Muon. match_rms_adamw: 0.2 sqrt(max(A, B)),
    with which updates are about as large as AdamW's, so that both have one learning rate; original:
    sqrt(max(1, A / B))."""

    def skips(self, norm: float) -> bool:
        """Whether the optimizer step of a gradient with this norm is left out."""
        return self.skip_grad_norm is not None and not norm <= self.skip_grad_norm

    @property
    def description(self) -> str:
        """Name of the optimizer and its learning rate, for the plan of a run."""
        name = "AdamW"
        if self.algorithm == "muon":
            name = (
                f"Muon for the matrices of the blocks (momentum {self.momentum:g}, {self.ns_steps} Newton-Schulz "
                f"steps, learning rate times {self.adjust_lr_fn}), AdamW for the rest"
            )
        return f"learning rate {self.lr:g}, {self.schedule} schedule; {name}"


LONGEST = 1200.0  # seconds; PyTorch ends a process that waits for others for half an hour


@dataclass
class VLLMConfig:
    """vLLM, if rollout.engine = "vllm"."""

    servers: tuple[str, ...] = ()
    """URLs of vLLM servers, such as "http://node7:8000". Prompts are spread over them by load. Empty: vLLM runs in the
    processes of the trainer."""
    folder: str = ""
    """Directory in which servers find the weights. Empty: /dev/shm if all servers are on this machine, and the run's
    folder otherwise, on a disk that they share with the trainer."""
    timeout: float = 600.0
    """Seconds that a server may take for the completions of a prompt, and that all servers may be unreachable."""
    tensor_parallel: int = 1
    """Ranks that share one engine, which has a part of each weight on each of them."""
    gpu_memory: float = 0.4
    """Share of a GPU's memory for the engine, with its weights and KV cache."""
    sleep: bool = True
    """On a GPU: give that memory back during the update."""
    adapters: bool = True
    """With LoRA: give the engine the adapters, if it supports them for the model. false: merged weights."""

    def faults(self, world: int) -> list[str]:
        """List the values that do not fit ``world`` ranks."""
        found = [
            f"vllm.servers: {url!r} is not a URL such as 'http://node7:8000'"
            for url in self.servers
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname
        ]
        if not self.timeout > 0 or (world > 1 and self.timeout > LONGEST):
            most = f" and at most {LONGEST:g} with several ranks, which wait for each other" * (world > 1)
            found.append(f"vllm.timeout = {self.timeout}: allowed is > 0{most}")
        if not 0 < self.gpu_memory <= 1:
            found.append(f"vllm.gpu_memory = {self.gpu_memory}: allowed is in (0, 1]")
        if self.tensor_parallel < 1 or world % self.tensor_parallel:
            found.append(
                f"vllm.tensor_parallel = {self.tensor_parallel}: allowed is a divisor of the number of ranks, {world}"
            )
        return found


@dataclass
class ModelConfig:
    path: str = "story-lm"
    """A Hugging Face model directory, a hub name, or the embedded "story-lm", "maze-lm" or "numbers-lm"."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute dtype. auto: bfloat16 on a GPU (with float32 master weights), float32 on a CPU."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    compile: bool = free(False)
    """Compile the blocks with torch.compile, except their attention. On a CPU it saves no time: its ops are compiled
    already."""


@dataclass
class RolloutConfig:
    prompts: int = bounded(6, ge=1)
    """P, prompts per step, over all ranks."""
    samples: int = bounded(8, ge=1)
    """M, completions per prompt: the size of a group."""
    max_new_tokens: int = bounded(128, ge=1)
    """Maximum number of tokens of a completion."""
    temperature: float = bounded(1.0, gt=0)
    """Temperature of sampling. The loss uses the same one."""
    top_k: int = bounded(0, ge=0, note="0: off")
    """Sample from the k most likely tokens; 0: all. With top_k, top_p or min_p, the policy that samples is not the one
    that is trained."""
    top_p: float = bounded(1.0, gt=0, le=1)
    """Sample from the most likely tokens that have this total probability."""
    min_p: float = bounded(0.0, ge=0, le=1)
    """Sample from tokens with at least this fraction of the probability of the most likely token."""
    stop_ids: tuple[int, ...] = bounded((), ge=0)
    """Token ids that end a completion, in addition to the model's EOS."""
    max_rows: int | None = free(None, ge=1)
    """Maximum number of completions decoded together per rank. It bounds the KV cache. None: 256 on a CPU, and on a GPU
    as many as its free memory holds."""
    engine: Literal["nlgrpo", "vllm"] = "nlgrpo"
    """Engine that samples: nlgrpo's own, or vLLM (section `vllm`)."""
    ahead: int = bounded(0, ge=0)
    """K: sample step t + K on vLLM servers while step t trains. Completions are then at most K steps old, which
    `loss.correction` corrects. 0: sample and train in turns."""


@dataclass
class RewardConfig:
    function: str = ""
    """`length(target=25, scale=128)`, `lexicon(path=..)`, `regex(pattern=..)`, `gsm8k()`, `classifier(path=..)`,
    `module:function` or `file.py:function`; for a diversity objective a kernel: `ngrams(n=2, of="words")`,
    `length(width=16)`, `equal(pattern=..)` or a function."""
    objective: str = "mean"
    """What is maximised: "mean", "bon:N" (best of N), "wor:N" (worst of N), "bop:RATE" (best of a Poisson number),
    "cvar:ALPHA" (mean of the lower tail), "soft:TAU" (soft best-of-N), "erm:BETA" (entropic risk), "distortion:" with a
    table or function of the rank, "maj:N" (majority vote over final answers), "functional:file.py:R" (any function of
    probabilities and rewards); "bon:N:unbiased", "wor:N:unbiased", "maj:N:unbiased". The suffix ":kde" smooths the
    rewards of a rank-based objective. For a similarity kernel: "rao", "dpp:N" (diversity)."""
    weight: float = 1.0
    """Weight w_i of the objective in the aggregate. 0: the reward is only computed and logged."""
    scale: float = 1.0
    """Factor on the reward, before the objective; -1 for users who want it low."""
    transform: str = ""
    """Transform of the reward's rank among samples of the reference (section `calibration`), usually with the objective
    "mean". InfAlign-CTRL: "identity", "log", "exp:T", "bon_fp:N", "won_fp:N", "fp:PROCEDURE" ("fp:cvar:0.1"), "power:N"
    (with "bon:N"), or a function of the rank. Variational best-of-N: "vbon:N", "vbon:N:bound"."""
    timeout: float = bounded(600.0, gt=0, infinite=True)
    """Timeout of one call, in seconds; inf: no limit. Over it, a Python function is interrupted; one that cannot be,
    such as C code that does not return, ends the run, or with `process` its process."""
    process: bool = False
    """Run the function in the main thread of a process of its own, which is ended and started again if a call takes too
    long. False: in the main thread of the trainer."""
    on_error: Literal["stop", "skip"] = "stop"
    """What happens when the function fails: stop the run, or skip (drop the affected groups and count them)."""


@dataclass
class CalibrationConfig:
    """Samples of the reference. Rewards with a transform are calibrated on them; offline algorithms train on them."""

    rollouts: str = ""
    """Folder written by `nlgrpo rollout`."""
    missing: Literal["error", "draw"] = "error"
    """For prompts without rollouts: stop with an error before training, or draw samples when the prompt is used."""
    samples: int = bounded(100, ge=2)
    """K, samples per prompt when they are drawn during training. With rollouts, their own K is used."""
    by: Literal["prompt", "pooled", "median"] = "prompt"
    """What InfAlign-CTRL calibrates a reward on: its rank among the prompt's own samples (prompt), its rank among the
    samples of all prompts in the rollouts (pooled), or its distance to the prompt's median (median)."""
    smoother: Literal["add-half", "exponential"] = "add-half"
    """Smoother of log F for vbon, -inf below the smallest sample: (count + 1/2) / (K + 1), or a fitted curve."""


@dataclass
class OfflineConfig:
    """How bon_sft, dpo, ipo, bonbon and loss.jeffreys turn samples of the reference into winners and pairs."""

    n: int = 2
    """N. The samples of a prompt are split at random into sets of N. Each set gives its best sample, or one pair."""
    rejected: Literal["worst", "random", "all"] = "worst"
    """Rejected sample of a pair: the worst of the set, or a random other one. all: every pair of two samples."""
    alpha: float | None = 0.005
    """bonbon only: weight of the likelihood of the best sample. The weight of the pairs is 1 - alpha. None: both terms
    have the same size at the start."""


@dataclass
class LossConfig:
    algorithm: Literal["grpo", "ppo", "bon_sft", "dpo", "ipo", "bonbon"] = "grpo"
    """Online: grpo and ppo train on the linearised rewards of the policy's own completions. In ppo the reward comes
    with the last token, and a critic (section `critic`) gives per-token advantages. Offline baselines: bon_sft
    (likelihood of the best of N), dpo, ipo and bonbon (losses on pairs) train on the samples of the reference in
    calibration.rollouts (section `offline`), ranked by the weighted sum of the rewards."""
    aggregate: str = "sum"
    """Aggregate of the weighted objectives: "sum", "min" (over those with a weight), "smooth_min:GAMMA"."""
    aggregate_at: Literal["batch", "prompt"] = "batch"
    """Aggregate the means over all prompts (IAMA), or the values at each prompt, which is a different objective."""
    aggregate_memory: float = bounded(0.0, ge=0, lt=1)
    """Decay of the moving averages at which the aggregate's gradient is taken. 0: use only the prompts of this step."""
    baseline: Baseline = "mean"
    """Baseline of a group's linearised rewards: mean, leave-one-out mean (loo, without the bias of 1/M), or none."""
    normalization: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = "dapo"
    """Divisor of the token losses: the length of the sequence (grpo), the number of tokens in the optimizer step (bnpo)
    or in the rollout (dapo), or a constant (dr_grpo)."""
    surrogate: Literal["ppo", "cispo", "reinforce"] = "ppo"
    """Clipped ratio (ppo; also GRPO), log-probs weighted by the capped ratio (cispo), or no ratio (reinforce)."""
    level: Literal["token", "sequence"] = "token"
    """Importance ratio per token (GRPO) or per sequence (GSPO)."""
    correction: str = "none"
    """Importance weights for completions that the policy did not sample itself: another engine, an earlier policy
    (rollout.ahead), top-k, top-p or min-p. w = policy / sampler. "tis:C": min(w, C), truncated. "mis:LOW:HIGH": 0
    outside the bounds, masked. C and HIGH may be inf."""
    correction_level: Literal["token", "sequence"] = "sequence"
    """One weight per completion, by which the objectives are linearised too: exact without a cut. Or one per token:
    biased, with less variance."""
    eps_low: float = 0.2
    """Lower clipping bound of the ratio: 1 - eps_low."""
    eps_high: float = 0.2
    """Upper clipping bound of the ratio: 1 + eps_high."""
    dual_clip: float | None = None
    """ppo surrogate only: no gradient where the advantage is negative and the ratio is above this (TRL's delta)."""
    beta: float = bounded(1e-4, ge=0)
    """Weight of the KL divergence to the initial model. 0: no reference model is loaded, unless
    loss.log_kl_every. For dpo and ipo, their beta; bon_sft and bonbon do not use it."""
    log_kl_every: int = bounded(0, ge=0)
    """Online, with beta = 0: log the KL to the initial model every N steps. Costs the memory of that model, and a
    forward pass at those steps. 0: never."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator in the loss, in the metrics and for target_kl. In the reward it is always k1."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss per token, or add -beta log(pi/pi_ref) to the linearised reward: of the whole completion
    for grpo, of each token for ppo."""
    kl_importance: bool | None = None
    """Weight k3 in the loss by the ratio (TRL's use_bias_correction_kl): with loss.level = "token" its expected
    gradient is then that of KL(policy || reference) at each token. false: k3 as papers print it, whose gradient is that
    of KL(reference || policy). None: true for k3 in the loss."""
    target_kl: float | None = bounded(None, gt=0)
    """Adapt beta to keep the KL per token near this value. None: beta is constant."""
    scale: Literal["none", "group", "batch"] = "none"
    """Divide advantages by the std of the group or batch, which removes the scale of the linearisation."""
    epochs: int = bounded(1, ge=1)
    """Passes over each rollout."""
    minibatches: int = bounded(1, ge=1)
    """Optimizer steps per pass."""
    jeffreys: float = bounded(0.0, ge=0, lt=1)
    """Online only: weight w of the likelihood of the best of offline.n reference samples, 1 - w of the loss. With the
    transform "vbon:N:bound" this is the Jeffreys divergence to best-of-N (BOND, where w = 0.5)."""

    @property
    def weights_kl(self) -> bool:
        """Whether the KL in the loss is weighted by the ratio: kl_importance, or what it is by default."""
        if self.kl_importance is None:
            return self.kl == "k3" and self.kl_in == "loss"
        return self.kl_importance

    def settings(self, beta: float) -> PolicyLossSettings:
        """Return the settings of the policy's loss with a KL weight of ``beta``."""
        from nlgrpo.kernels.reference import PolicyLossSettings  # PyTorch

        return PolicyLossSettings(
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            dual_clip=self.dual_clip,
            beta=beta if self.kl_in == "loss" else 0.0,
            kl="k3_iw" if self.weights_kl else self.kl,
            surrogate=self.surrogate,
        )

    @property
    def offline(self) -> bool:
        """Whether training uses stored samples of the reference and generates nothing."""
        return self.paired or self.algorithm == "bon_sft"

    @property
    def paired(self) -> bool:
        """Whether the loss is on pairs."""
        return self.algorithm in ("dpo", "ipo", "bonbon")

    @property
    def has_reference(self) -> bool:
        """Whether a frozen reference model is loaded."""
        return self.paired if self.offline else self.beta > 0 or self.log_kl_every > 0


@dataclass
class CriticConfig:
    """The critic of PPO."""

    path: str = ""
    """Initial model: a causal model, whose values start at 0, or a reward model. Empty: the same as the policy."""
    trunk: Literal["own", "shared"] = "own"
    """A separate model, or a value head on the policy's last hidden states."""
    lr: float = bounded(1e-5, ge=0)
    """Learning rate of the critic, or of the head on a shared trunk. It follows the schedule of [optim]."""
    warmup_steps: int = bounded(0, ge=0)
    """Steps that train only the critic. The policy's learning rate is 0 in them, and its schedule starts after them."""
    gamma: float = bounded(1.0, ge=0, le=1)
    """Discount factor per token."""
    lam: float = bounded(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation. 1: the return minus the value."""
    clip: float = bounded(0.2, gt=0, infinite=True)
    """Clipping range of the value around its value at the rollout. inf: no clipping."""
    coef: float = bounded(0.5, gt=0)
    """Weight of the value loss relative to the policy loss."""
    whiten: bool = True
    """Normalize the advantages of all tokens to mean 0 and standard deviation 1. A KL in the loss then has the weight
    beta times that standard deviation; a KL in the reward (loss.kl_in) is divided with the advantages."""


@dataclass
class LoopConfig:
    """What all training loops share: seed, micro-batches, checkpoints."""

    seed: int = bounded(0, ge=0)
    """Random seed."""
    micro_batch_tokens: int | None = free(None, ge=1)
    """Tokens per forward and backward; gradients are accumulated over micro-batches. None: 16384 on a GPU, and 1024 on
    a CPU, which fits its caches, or up to 8192 if a prompt and its completions need as many."""
    checkpoint_every: int = free(0, ge=0, note="0: only at the end")
    """Steps between checkpoints. 0: only at the end."""
    keep_checkpoints: int = free(2, ge=1)
    """Number of checkpoints to keep: the newest ones."""
    keep_every: int = free(0, ge=0, note="0: only the newest checkpoints")
    """Also keep each checkpoint whose step is a multiple of this number. 0: only the newest ones."""
    async_save: bool | None = free(None)
    """Write checkpoints while training continues, from a copy in the memory of the host. None: with GPUs."""
    track: tuple[str, ...] = free(())
    """Trackers that get the metrics: "wandb", "trackio", "mlflow", "comet", "tensorboard"."""
    project: str = free("nlgrpo")
    """Project of the run in W&B and Trackio, and its experiment in MLflow."""
    run_name: str = free("")
    """Name of the run in trackers. Empty: the name of its folder."""
    restart: bool = free(False)
    """Restart from scratch in a folder that holds a run. The files of that run are removed."""
    allow_changed: tuple[Literal["data", "rewards", "model", "tokenizer", "template"], ...] = free(())
    """What may have changed since the run started: it then resumes with the new data, files of rewards, weights of
    model.path, tokenizer or chat template. Without a name here, a change of it is an error."""
    timeout: float = free(600.0, gt=0, infinite=True)
    """Seconds without progress on any rank, or without a sign of life of one, after which all ranks end, and the rank
    to blame is named. Rewards may also take as long as their own timeouts; vLLM, environments, loading
    and saving have six times as long. inf: no limit."""
    grace_period: float = free(600.0, gt=0, infinite=True)
    """Seconds from SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 in which the step must be finished and saved; after them the
    process is ended. inf: no limit."""
    profile: str = free("")
    """Steps to profile, such as "10:13" for 10, 11 and 12: a trace, and on a GPU a memory snapshot, in the folder
    "profile" of the run."""
    deterministic: bool = free(False)
    """On a GPU, compute with PyTorch's deterministic algorithms, so that a resumed run has the same bits as one that
    was not interrupted. It is slower; an op that has no such algorithm is an error. CPUs need no setting."""

    def limits(self, **longer: float) -> TimeLimits:
        """How long a rank may be in one place: longer while it loads or saves, and in the phases ``longer``."""
        disk = PATIENCE * self.timeout
        return TimeLimits(self.timeout, {"start": disk, "checkpoint": disk, "export": disk, **longer})


@dataclass
class TrainConfig(LoopConfig):
    steps: int = free(100, ge=0)
    """Training steps, with one rollout each."""
    seed: int = bounded(0, ge=0)
    """Random seed of prompts, samples and minibatches."""
    out: str = free("")
    """Folder of the run. Empty: runs/<recipe>."""
    checkpoint_every: int = free(50, ge=0, note="0: only at the end")
    """Steps between checkpoints. 0: only at the end."""
    samples_every: int = free(50, ge=0, note="0: never")
    """Steps between tables of sampled completions. 0: never."""
    push: str = free("")
    """Repository on the Hugging Face Hub, USER/NAME, that gets the model, its card and the report at the end."""
    keep_best: str = free("")
    """Metric of the evaluations whose best policy is also exported, to RUN/best: "objective/NAME", "SET/reward", ..
    "min:" before it: the smallest. Empty: only the last policy is exported."""
    max_empty_steps: int = free(20, ge=0, note="0: never")
    """Steps in a row without a reward for any completion, because all abstained or failed, that end the run with an
    error. 0: never."""
    check_memory: bool = True
    """Refuse a run whose plan needs more memory than the machine has."""


@dataclass
class DivergenceConfig:
    """What happens when a metric leaves its band."""

    action: Literal["none", "warn", "stop", "rollback"] = "warn"
    """What to do when the loss, the KL, the gradient norm, the objective or the length of completions has left its
    band, or all linearised rewards of a prompt are equal, so that nothing is learned: warn, with what to change; stop;
    or roll back to the last checkpoint before it, and continue with other samples. The rewards themselves do not
    decide: those of opposed users cancel in their sum, and their mean may fall while best-of-N rises."""
    window: int = bounded(50, ge=MINIMUM_WINDOW)
    """Steps whose values make a band: their median, plus or minus `factor` standard deviations (from the median
    absolute deviation)."""
    factor: float = bounded(10.0, gt=0, infinite=True)
    """Half of the width of a band, in standard deviations."""
    patience: int = bounded(3, ge=1)
    """Steps in a row outside of its band after which a metric has left it."""
    max_kl: float | None = bounded(None, gt=0, infinite=True)
    """KL per token above which it has left its band, whatever the last values are. None: no limit."""
    rollbacks: int = bounded(3, ge=0)
    """Rollbacks after which a run stops instead."""


@dataclass
class EvaluationConfig:
    prompts: int = free(64, ge=0, note="0: no evaluation")
    """Number of evaluation prompts, before and after training. 0: no evaluation."""
    samples: int = free(16, ge=1)
    """n, completions per prompt."""
    ns: tuple[int, ...] = free((1, 4))
    """Values of N for the printed best-of-N. 1 is the mean."""
    every: int = free(0, ge=0, note="0: only before and after training")
    """Steps between evaluations during training; they do not change its samples. 0: only before and after training."""
    procedures: tuple[str, ...] = free(("bon",))
    """What is measured beside the objectives: "bon", "wor" (for every N of `ns`), "soft:0.1", "maj:4", ..., as
    `nlgrpo evaluate --procedures`. Each has a win rate against the initial policy."""
    gold: tuple[str, ...] = free(())
    """Names of rewards that judge the responses that the other rewards choose: best-of-N by a chooser."""
    patience: int = free(0, ge=0, note="0: never")
    """Evaluations in a row without a better value of train.keep_best that end the run. 0: never."""
    sets: Table = field(default_factory=dict, metadata={FREE: True})
    """Further evaluation sets by name, such as [evaluation.sets.greedy] with top_k = 1 and samples = 1. A set has the
    keys of this section but `every` and `patience`, those of [rollout] for sampling, and with a `source` those of
    [data]; without one, it has the evaluation prompts. `rewards`: names of those that score it, by default all. Prompts
    that are also trained on are an error, unless `shared = true`."""

    def ns_fault(self, where: str = "evaluation") -> str:
        """What is wrong with `ns`; empty if nothing is."""
        if self.ns and all(1 <= n <= self.samples for n in self.ns):
            return ""
        return f"{where}.ns = {self.ns!r}: allowed is between 1 and {where}.samples = {self.samples}"


@dataclass
class Config:
    """Configuration of a whole training run."""

    recipe: tyro.conf.Fixed[str] = "blank"
    """Name of the recipe that the configuration started from."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig, metadata={FREE: True})
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig, metadata={FREE: True})
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig, metadata={FREE: True})
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return Path(os.path.expanduser(self.train.out) or f"runs/{self.recipe}")

    def limits(self) -> TimeLimits:
        """How long a rank may be in one place: longer where it waits for rewards, vLLM, environments and disks."""
        seconds = self.train.timeout
        rewards = seconds + sum(reward.timeout for reward in self.rewards.values())
        outside = self.rollout.engine == "vllm" or bool(self.environment.id)
        return self.train.limits(rewards=rewards, generate=PATIENCE * seconds if outside else seconds)


# --- reward models and value models -----------------------------------------------------------------------------------


@dataclass
class EpochsConfig(LoopConfig):
    epochs: float = bounded(1.0, gt=0)
    """Epochs: passes over the examples."""
    out: str = free("")
    """Folder of the run. Empty: runs/<name of the .toml file>, or runs/<name of the command>."""


@dataclass
class HeldOutConfig:
    every: int = free(0, ge=0, note="0: only before and after")
    """Steps between evaluations during training. 0: only before and after."""


@dataclass
class ScalarHeadConfig:
    """What the configurations of reward models and value models share. They add the examples and their loss."""

    name: tyro.conf.Fixed[str] = ""
    """Name of the run."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig, metadata={FREE: True})
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5, schedule="cosine"))
    train: EpochsConfig = field(default_factory=EpochsConfig)
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return Path(os.path.expanduser(self.train.out) or f"runs/{self.name}")


# --- files and the command line ---------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Any], base: Config | None = None, where: str = "the configuration") -> Config:
    """Return ``base`` with ``values`` laid over it. A [rewards] table replaces all rewards.

    Raises UserError for an unknown key, with the nearest known one, and for a value of the wrong type.
    """
    return overlay(base or Config(), values, where)


TINY = "tiny"  # table of a TOML file


def read_toml(path: Path, base: AnyConfig, *, tiny: bool = False) -> AnyConfig:
    """Return ``base`` with a TOML file laid over it, and with ``tiny`` also the file's table ``[tiny]``.

    Raises UserError as `from_dict`, for an unreadable file, and with ``tiny`` for a file without that table.
    """
    if not path.is_file():
        raise UserError(f"there is no configuration file {path}")
    try:
        values = tomllib.loads(path.read_text("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    small = values.pop(TINY, {})
    if not isinstance(small, dict):
        raise UserError(f"{path}: {TINY} must be a table, got {small!r}")
    if tiny and not small:
        raise UserError(f"{path} has no table [{TINY}], which --{TINY} lays over the file")
    if "recipe" in small:
        raise UserError(f"{path}: [{TINY}] cannot name a recipe")
    config = overlay(base, values, str(path))
    smaller = _overlay(config, small, f"{path}, [{TINY}]", "", type(base), keep=True)  # mistakes are found in any case
    return smaller if tiny else config


def overlay(base: AnyConfig, values: Mapping[str, Any], where: str) -> AnyConfig:
    """Like `from_dict`, for any configuration dataclass."""
    return _overlay(base, values, where, "", type(base))


def _overlay(base: Any, values: Mapping[str, Any], where: str, prefix: str, root: type, *, keep: bool = False) -> Any:
    """``keep``: the rewards of ``base``, and the keys that ``values`` does not name in those that it names."""
    hints = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        if key not in hints:
            raise UserError(f"{where}: unknown key {name!r}{_hint(key, hints, prefix, root)}")
        current = getattr(base, key)
        if not isinstance(current, dict) and not dataclasses.is_dataclass(current):
            changes[key] = _coerce(value, hints[key], where, name)
        elif not isinstance(value, Mapping):
            raise UserError(f"{where}: {name} must be a table, got {value!r}")
        elif dataclasses.is_dataclass(current):
            changes[key] = _overlay(current, value, where, f"{name}.", root, keep=keep)
        elif hints[key] == dict[str, Any]:
            changes[key] = dict(value)
        else:
            changes[key] = dict(current) if keep else {}
            for reward, given in value.items():
                table = given if isinstance(given, Mapping) else {"function": given}
                own = changes[key].get(reward, RewardConfig())
                changes[key][reward] = _overlay(own, table, where, f"{name}.{reward}.", root)
    return dataclasses.replace(base, **changes)


def _coerce(value: Any, kind: Any, where: str, name: str) -> Any:
    """Check ``value`` against the annotated type. Only int to float and list to tuple are converted."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    for option in options:
        if typing.get_origin(option) is Literal and value in typing.get_args(option):
            return value
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            inner = typing.get_args(option)[0]
            return tuple(_coerce(item, inner, where, name) for item in value)
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            with suppress(OverflowError):  # of an integer of hundreds of digits
                return float(value)
        if option in (int, str, bool, type(None)) and type(value) is option:
            return value
    raise UserError(f"{where}: {name} = {value!r}: expected {' or '.join(map(_describe, options))}")


def _describe(kind: Any) -> str:
    """Name a type as a TOML user would."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, arguments))
    if typing.get_origin(kind) is tuple:
        return f"a list of {_describe(arguments[0])}"
    return "none" if kind is type(None) else kind.__name__


def _hint(key: str, known: Mapping[str, Any], prefix: str, root: type) -> str:
    """Suggest a key: one of this name in another section, or the nearest one in this section."""
    sections = {name: kind for name, kind in typing.get_type_hints(root).items() if dataclasses.is_dataclass(kind)}
    meant = [f"{name}.{key}" for name, kind in sections.items() if key in kind.__dataclass_fields__]
    meant = meant or [prefix + near for near in nearest(key, known, cutoff=0.5)]
    return did_you_mean(meant, f"; known keys: {', '.join(prefix + k for k in known)}")


def dashed(name: str) -> str:
    """Spell a name as on the command line."""
    return name.replace("_", "-")
