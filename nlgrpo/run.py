"""The parts of a run, built from its configuration, and what its folder holds."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nlgrpo import (
    aggregation,
    checkpoint,
    config,
    config_checks,
    data,
    hf_weights,
    metrics,
    objectives,
    rewards,
    sampled,
    user_code,
)
from nlgrpo import model as models
from nlgrpo.aggregation import Aggregate, moving_average
from nlgrpo.config import Config
from nlgrpo.families import Shape, shape_of
from nlgrpo.groups import Groups
from nlgrpo.kl import AdaptiveBeta
from nlgrpo.learner import Learner, make_optimizer
from nlgrpo.model import Decoder
from nlgrpo.parallel import Ranks, full_parameters, shard
from nlgrpo.rollouts import Sampler
from nlgrpo.sampling import Sampling
from nlgrpo.timing import Clock, flops_utilisation

EMBEDDED_DATA = {"story-prompts": "prompts.jsonl", "story-evaluation": "eval_prompts.jsonl"}
# What may differ when a run goes on: how long it is, and what it keeps and shows.
FREE = ("train.steps", "train.checkpoint_every", "train.keep_checkpoints", "train.samples_every", "train.tensorboard",
        "train.restart", "train.out", "train.micro_batch_tokens", "rollout.max_rows", "evaluation.prompts",
        "evaluation.samples", "evaluation.ns")  # fmt: skip


@dataclass
class Progress:
    """How far a run is: all that a checkpoint holds besides tensors and random states."""

    step: int = 0
    cursor: int = 0  # prompts taken so far
    num_tokens: int = 0  # prompt and completion tokens trained on so far
    beta: float = 0.0
    averages: list[float] = field(default_factory=list)  # moving averages of the objectives' values

    def advance(self, prompts: int, tokens: int) -> None:
        """One step on."""
        self.step, self.cursor, self.num_tokens = self.step + 1, self.cursor + prompts, self.num_tokens + tokens


@dataclass
class Run:
    """Everything that the loop works with."""

    config: Config
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    shape: Shape
    source: Path  # directory of the model that training starts from
    prompts: data.PromptSet
    held_out: data.PromptSet
    sampler: Sampler
    objectives: dict[str, objectives.Objective]
    aggregate: Aggregate
    compute: torch.dtype
    progress: Progress = field(default_factory=Progress)

    @property
    def folder(self) -> Path:
        return self.config.run

    @property
    def micro_batch_tokens(self) -> int:
        on_device = 16384 if self.ranks.device.type == "cuda" else 1024
        return self.config.train.micro_batch_tokens or on_device

    def weights(self) -> dict[str, float]:
        return {name: reward.weight for name, reward in self.config.rewards.items()}

    def aggregated(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """g at the values (m, P) of the objectives, and its gradient: at each prompt, or at the means over all of them.

        With a memory the gradient is taken at moving averages of the means, which this call moves on.
        """
        loss = self.config.loss
        if loss.aggregate_at == "batch":
            values = values.nanmean(-1)
        at = values
        if loss.aggregate_memory > 0:
            at = moving_average(self.progress.averages, values, loss.aggregate_memory)
            self.progress.averages = at.tolist()
        return self.aggregate.value(values), self.aggregate.gradient(at)

    def evaluator(self) -> Sampler:
        """The sampler with the evaluation's number of samples, and noise that training never sees."""
        evaluation_seed = self.config.train.seed ^ (1 << 62)
        return Sampler(
            self.tokenizer,
            self.sampler.sampling,
            self.config.evaluation.samples,
            self.config.rollout.max_rows,
            evaluation_seed,
            self.sampler.rewards,
        )

    def next_batch(self) -> data.Batch:
        """This rank's share of the step's prompts."""
        share = self.config.rollout.prompts // self.ranks.world
        return self.prompts.take(self.progress.cursor + self.ranks.rank * share, share)

    def evaluated(self) -> dict[str, sampled.Sampled]:
        """What the folder holds of an evaluation on as many prompts and samples as this configuration asks for."""
        if not (self.folder / sampled.FILE).is_file():
            return {}
        shape = (min(self.config.evaluation.prompts, len(self.held_out)), self.config.evaluation.samples)
        found = sampled.read_evaluation(self.folder)
        return {name: model for name, model in found.items() if tuple(model.lengths.shape) == shape}

    def write_evaluation(self, **models: sampled.Sampled) -> None:
        if self.ranks.first:
            sampled.write_evaluation(self.folder, **models)

    def evaluate(self, model: Decoder) -> sampled.Sampled:
        batch = self.held_out.take(0, min(self.config.evaluation.prompts, len(self.held_out)))
        return self.evaluator().evaluate(model, batch, self.ranks, self.objectives, self.weights())

    def speed(self, clock: Clock, groups: Groups) -> dict[str, float]:
        """``time/*``, ``perf/*`` and the tokens so far."""
        generated = int(groups.lengths.sum())
        times = clock.metrics(generated)
        flops = self.shape.parameters * (6 * groups.tokens * self.config.loss.epochs + 2 * generated)
        used = flops_utilisation(self.ranks.device, flops / self.ranks.world, times["step_time"])
        return times | used | {"num_tokens": self.progress.num_tokens}

    def controller(self) -> AdaptiveBeta | None:
        target = self.config.loss.target_kl
        return None if target is None else AdaptiveBeta(self.progress.beta, target)

    def logger(self) -> metrics.MetricsLogger:
        return metrics.MetricsLogger(
            self.folder,
            total_steps=self.config.train.steps,
            enabled=self.ranks.first,
            tensorboard=self.config.train.tensorboard,
            resume_step=self.progress.step,
        )

    def learner(self) -> Learner:
        """Load the policy and, where it is held to one, the frozen reference."""
        cfg = self.config
        stored = torch.float32 if self.compute == torch.bfloat16 else self.compute
        model = models.load(self.source, dtype=stored, device=self.ranks.device)
        model.activation_checkpointing = cfg.model.activation_checkpointing
        model = shard(model, self.ranks, self.compute)
        reference = None
        if cfg.loss.beta > 0:
            reference = models.load(self.source, dtype=self.compute, device=self.ranks.device)
            reference = shard(reference.requires_grad_(False), self.ranks, self.compute)
        return Learner(
            model=model,
            reference=reference,
            optimizer=make_optimizer(model, cfg.optim),
            loss=cfg.loss,
            optim=cfg.optim,
            ranks=self.ranks,
            temperature=cfg.rollout.temperature,
            max_new_tokens=cfg.rollout.max_new_tokens,
            micro_batch_tokens=self.micro_batch_tokens,
            seed=cfg.train.seed,
        )

    def save(self, learner: Learner) -> None:
        state = vars(self.progress) | {"config": config.to_dict(self.config)}
        where = self.folder / "checkpoints"
        keep = self.config.train.keep_checkpoints
        checkpoint.save(
            where, self.progress.step, model=learner.model, optimizer=learner.optimizer, state=state, keep=keep
        )

    def restore(self, learner: Learner) -> bool:
        """Go on from the newest whole checkpoint; False where there is none."""
        state = checkpoint.load(self.folder / "checkpoints", model=learner.model, optimizer=learner.optimizer)
        if state is not None:
            self.progress = Progress(**{name: state[name] for name in vars(self.progress)})
        return state is not None

    def export(self, learner: Learner) -> Path:
        """Write the policy as a Hugging Face directory, in the type that it computes in; collective."""
        folder = self.folder / "model"
        parameters = full_parameters(learner.model, self.compute)
        if self.ranks.first:
            models.save(learner.model, folder, tokenizer=self.tokenizer, parameters=parameters, like=self.source)
        return folder


def build(cfg: Config, ranks: Ranks) -> Run:
    """Read tokenizer, data and rewards and fit them together; the weights are read later, by `Run.learner`.

    Raises ValueError for whatever of the configuration cannot be run.
    """
    config_checks.check(cfg, world=ranks.world)
    source = hf_weights.locate(cfg.model.path)
    shape = shape_of(models.read_config(source))
    tokenizer = load_tokenizer(source)
    room = shape.context - cfg.rollout.max_new_tokens
    if room < 1:
        raise ValueError(
            f"rollout.max_new_tokens = {cfg.rollout.max_new_tokens} leaves no room for a prompt in the context of "
            f"{shape.context} tokens that {cfg.model.path} has"
        )
    prompts = load_prompts(cfg, cfg.data.source, tokenizer, room)
    if cfg.data.evaluation:
        held_out = load_prompts(cfg, cfg.data.evaluation, tokenizer, room)
    else:
        prompts, held_out = prompts.split(cfg.evaluation.prompts)
    parsed = {name: objectives.parse(r.objective, user_code.function) for name, r in cfg.rewards.items()}
    loaded = [
        rewards.load(
            name, r.function, timeout=r.timeout, on_error=r.on_error, scale=r.scale, device=str(ranks.device),
            pairwise=parsed[name].pairwise,
        )
        for name, r in cfg.rewards.items()
    ]  # fmt: skip
    sampling = sampling_of(cfg, tokenizer, source)
    return Run(
        config=cfg,
        ranks=ranks,
        tokenizer=tokenizer,
        shape=shape,
        source=source,
        prompts=prompts,
        held_out=held_out,
        sampler=Sampler(tokenizer, sampling, cfg.rollout.samples, cfg.rollout.max_rows, cfg.train.seed, loaded),
        objectives=parsed,
        aggregate=aggregation.parse(cfg.loss.aggregate, [r.weight for r in cfg.rewards.values()]),
        compute=compute_dtype(cfg.model.dtype, ranks.device),
        progress=Progress(beta=cfg.loss.beta),
    )


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """The model directory's tokenizer; no code of it is run."""
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{source} has no tokenizer that transformers can read: {error}") from error


def load_prompts(cfg: Config, name: str, tokenizer: PreTrainedTokenizerBase, room: int) -> data.PromptSet:
    if not name:
        raise ValueError("data.source is empty: name a file of prompts, a data set, or the embedded 'story-prompts'")
    path = str(files("nlgrpo") / "assets" / EMBEDDED_DATA[name]) if name in EMBEDDED_DATA else name
    d = cfg.data
    return data.load(
        path,
        tokenizer,
        max_prompt_tokens=room,
        split=d.split,
        prompt_column=d.prompt_column,
        template=d.template,
        cut_after=d.cut_after,
        separator=d.separator,
        first_words=d.first_words,
        seed=cfg.train.seed,
        shuffle=d.shuffle,
        limit=d.limit,
        add_bos=d.add_bos,
    )


def sampling_of(cfg: Config, tokenizer: PreTrainedTokenizerBase, source: Path) -> Sampling:
    """The rollout's sampling; it stops at the ids of the model's generation config and the tokenizer's EOS too."""
    r = cfg.rollout
    return Sampling(
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        max_new_tokens=r.max_new_tokens,
        stop_ids=tuple(dict.fromkeys((*r.stop_ids, *stop_ids_of(tokenizer, source)))),
    )


def stop_ids_of(tokenizer: PreTrainedTokenizerBase, source: Path) -> list[int]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (source / name).is_file():
            declared = json.loads((source / name).read_text("utf-8")).get("eos_token_id")
            ids += declared if isinstance(declared, list) else [] if declared is None else [declared]
    return ids + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])


# --- the folder -------------------------------------------------------------------------------------------------------


def open_folder(run: Run) -> None:
    """Make the run's folder, or check that the run in it is this one; collective. ValueError where it is another."""
    fault = ""
    try:
        fault = _open_folder(run) if run.ranks.first else ""
    except OSError as error:
        fault = f"{run.folder} cannot be the folder of a run: {error}"
    fault = run.ranks.gather_objects(fault)[0]
    if fault:
        raise ValueError(fault)


def _open_folder(run: Run) -> str:
    """What is wrong with the folder, if anything is."""
    folder, now = run.folder, _as_json(run.config)
    known = folder / "config.json"
    if run.config.train.restart and known.is_file():
        _clear(folder)
    elif known.is_file():
        changed = config.differences(json.loads(known.read_text("utf-8")), now)
        changed = [f"  {line}" for line in changed if not line.startswith(_free(run.config))]
        if changed:
            return "\n".join(
                [
                    f"{folder} holds a run with another configuration:",
                    *changed,
                    "  Choose another folder with --train.out, or begin anew in this one with --train.restart",
                ]
            )
    elif folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= {"config.json.tmp"}):
        return f"{folder} exists and holds no run; choose another folder with --train.out"
    folder.mkdir(parents=True, exist_ok=True)
    metrics.atomic_write(known, json.dumps(now, indent=2) + "\n")
    return ""


def _free(cfg: Config) -> tuple[str, ...]:
    """`FREE`, but for the number of evaluation prompts where these are held out of the training data."""
    return FREE if cfg.data.evaluation else tuple(name for name in FREE if name != "evaluation.prompts")


def _as_json(cfg: Config) -> dict[str, Any]:
    return json.loads(json.dumps(config.to_dict(cfg)))


def _clear(folder: Path) -> None:
    """Remove what a run writes, and nothing else that stands in its folder; its config.json is replaced afterwards."""
    for name in ("checkpoints", "model", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (metrics.FILE, metrics.SAMPLES_FILE, sampled.FILE, "report.html", "lengths.png", "curves.png"):
        (folder / name).unlink(missing_ok=True)
