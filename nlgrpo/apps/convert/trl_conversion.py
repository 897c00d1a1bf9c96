"""Options of a TRL run to keys of nlgrpo. Read `convert` first."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nlgrpo.apps.convert import trl_options
from nlgrpo.apps.convert.trl_script import EVALUATION, KIND, PEFT, Reward
from nlgrpo.config import comparing, schema, toml_file, validate
from nlgrpo.errors import UserError, did_you_mean, nearest
from nlgrpo.runtime import secrets

# Options that choose the trainer where a file does not name it.
ONLY_RLOO = trl_options.RLOO.keys() - trl_options.GRPO.keys()
AT_LEAST_ONE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_generations", "num_iterations", "num_processes",
)  # fmt: skip
SECRET = re.compile(r"(?:^|_)(?:token|key|password|secret)$")  # the end of an option's name
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf")
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
# TRL's own functions, by the names of its script.
BUILTIN = {
    "accuracy_reward": "math(column='solution')",
    "get_soft_overlong_punishment": "overlong(limit=1280, margin=256)",
    "think_format_reward": "trl.rewards:think_format_reward",
    "reasoning_accuracy_reward": "trl.rewards:reasoning_accuracy_reward",
}
WEIGHT = trl_options.Option(1.0, "", "rewards.NAME.weight", float)
# PEFT's target modules by the type of the model.
TARGETS = {
    "llama": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
    "gpt_neox": ("query_key_value",),
    "gpt2": ("c_attn",),
}
# Types by words in the names of models; the first one counts.
WORDS = {
    "pythia": "gpt_neox",
    "neox": "gpt_neox",
    "gpt2": "gpt2",
    "qwen3": "qwen3",
    "qwen": "qwen2",
    "mistral": "mistral",
    "llama": "llama",
    "smollm": "llama",
}


@dataclass
class Converted:
    """The keys of nlgrpo that differ from its defaults, by section, and what could not be converted."""

    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """To check by hand."""
    missing: list[str] = field(default_factory=list)
    """Options that are not carried over, with the reason."""

    def set(self, key: str, value: Any) -> None:
        section, _, name = key.rpartition(".")
        self.keys.setdefault(section, {})[name] = value

    def drop(self, name: str, value: Any, reason: str) -> None:
        """List an option that is not carried over."""
        shown = "***" if SECRET.search(name) else repr(value)
        self.missing.append(f"{name} = {shown}: {reason}")

    def toml(self) -> str:
        """Return the TOML file, with the rest as comments, without secrets."""
        lines = []
        for title, texts in (("Check", self.notes), ("Not carried over", self.missing)):
            lines += [f"# {title}: {' '.join(secrets.hide(text).split())}" for text in texts]
        return "\n".join([*lines, "", toml_file.text(self.sections())]).strip() + "\n"

    def sections(self) -> dict[str, Any]:
        """Return the keys by section, those of a reward below the section rewards."""
        found: dict[str, Any] = {}
        for section, keys in self.keys.items():
            name, _, part = section.partition(".")
            target = found.setdefault(name, {})
            target.update({part: keys} if part else keys)
        return found


def convert(options: Mapping[str, Any], world: int = 1) -> Converted:
    """Convert options of TRL; those that are absent have TRL's defaults. ``world``: number of processes.

    Raises UserError for values that TRL refuses.
    """
    if world < 1:
        raise UserError(f"processes = {world}: expected at least 1")
    trainer = options.get(KIND) or ("rloo" if ONLY_RLOO & options.keys() else "grpo")
    known = trl_options.known(trainer)
    given = trl_options.defaults(known)
    for name, value in options.items():
        if name in known:
            given[name] = trl_options.typed(name, value, known[name])
    for name in (KIND, PEFT, EVALUATION):
        given[name] = options.get(name)
    for name in AT_LEAST_ONE:
        if given[name] is not None and given[name] < 1:
            raise UserError(f"{name} = {given[name]}: expected at least 1")
    for name in ("warmup_steps", "warmup_ratio", "save_steps", "eval_steps", "logging_steps"):
        if given[name] is not None and not 0 <= given[name] < math.inf:
            raise UserError(f"{name} = {given[name]}: expected a number of steps, or a share of them below 1")
    out = Converted()
    _batches(given, out, world)
    _model(given, out)
    _data(given, out)
    _optimizer(given, out)
    if trainer == "rloo":
        _rloo(given, out)
    else:
        _grpo(given, out)
    _sampling(given, out)
    _saving(given, out)
    _evaluation(given, out)
    _rewards(given, out)
    _adapters(given, out)
    steps = out.keys.get("train", {}).get("steps")  # written also if it is the default
    kept = comparing.without_defaults({name: keys for name, keys in out.sections().items() if name != "rewards"})
    out.keys = {name: kept.get(name, keys) for name, keys in out.keys.items() if name in kept or "." in name}
    if given["max_steps"] > 0:
        out.set("train.steps", steps)
    schema.from_dict(out.sections(), where="the converted configuration")
    for name, value in options.items():
        if name in (KIND, PEFT, EVALUATION):
            continue
        if name not in known:
            hint = did_you_mean(nearest(name, known, cutoff=0.7), "")
            out.drop(name, value, f"not an option of {trainer.upper()}Config or TRL's scripts (1.16){hint}")
        elif not known[name].keys and trl_options.typed(name, value, known[name]) != known[name].default:
            out.drop(name, value, known[name].note)
    return out


# --- batches and steps ------------------------------------------------------------------------------------------------


def _batches(given: dict[str, Any], out: Converted, world: int) -> None:
    """TRL counts completions per device, and optimizer steps; nlgrpo prompts of a rollout, and rollouts."""
    if given["num_processes"] and world not in (1, given["num_processes"]):
        of_file = given["num_processes"]
        raise UserError(f"the file has num_processes = {of_file}, and --processes is {world}; give one of them")
    per_step = given["per_device_train_batch_size"] * (given["num_processes"] or world)
    accumulated = given["gradient_accumulation_steps"]
    samples = given["num_generations"]
    if given["generation_batch_size"] and given["steps_per_generation"]:
        raise UserError("generation_batch_size and steps_per_generation: TRL takes only one of them")
    steps = given["steps_per_generation"] or accumulated
    if given["generation_batch_size"]:
        steps, over = divmod(given["generation_batch_size"], per_step)
        if over:
            out.notes.append(f"generation_batch_size = {given['generation_batch_size']} is no multiple of {per_step}")
    prompts, rest = divmod(per_step * steps, samples)
    if rest or prompts == 0:
        out.notes.append(f"{per_step * steps} completions per rollout are no multiple of num_generations = {samples}")
    minibatches, uneven = divmod(steps, accumulated)
    if uneven or minibatches == 0:
        out.notes.append(f"steps_per_generation = {steps} is not a multiple of {accumulated} accumulation steps")
    out.set("rollout.prompts", max(prompts, 1))
    out.set("rollout.samples", samples)
    out.set("loss.minibatches", max(minibatches, 1))
    out.set("loss.epochs", given["num_iterations"])
    updates = max(minibatches, 1) * given["num_iterations"]
    given["updates"] = updates
    if given["max_steps"] > 0:
        out.set("train.steps", max(1, given["max_steps"] // updates))
        if given["max_steps"] % updates:
            out.notes.append(f"train.steps: {given['max_steps']} optimizer steps, and each rollout has {updates}")
    else:
        epochs = given["num_train_epochs"]
        out.notes.append(f"train.steps: {epochs:g} epochs are {epochs:g} x (number of prompts) / {max(prompts, 1)}")
    _warmup(given, out)


def _warmup(given: Mapping[str, Any], out: Converted) -> None:
    """TRL's warm-up is a number of optimizer steps, or below 1 a share of them."""
    warmup = given["warmup_steps"] or given["warmup_ratio"]
    if not warmup:
        return
    if given["lr_scheduler_type"] == "constant":
        out.notes.append("optim.warmup_steps: the schedule 'constant' of TRL has no warm-up")
        return
    if warmup < 1 and given["max_steps"] <= 0:
        out.notes.append(f"optim.warmup_steps: {warmup:g} of train.steps")
        return
    steps = math.ceil(given["max_steps"] * warmup) if warmup < 1 else int(warmup)
    out.set("optim.warmup_steps", _rollouts("optim.warmup_steps", steps, given, out))
    out.notes.append("optim.warmup_steps: step t has the learning rate of TRL's step t + 1, which starts at 0")


def _rollouts(key: str, steps: int, given: Mapping[str, Any], out: Converted) -> int:
    """Optimizer steps as rollouts, rounded up."""
    updates = given["updates"]
    if steps % updates:
        out.notes.append(f"{key}: {steps} optimizer steps are {steps / updates:g} rollouts")
    return -(-steps // updates)


# --- model and data ---------------------------------------------------------------------------------------------------


def _model(given: Mapping[str, Any], out: Converted) -> None:
    path = given["model_name_or_path"] or given["model"]
    if isinstance(path, str):
        out.set("model.path", path)
    else:
        out.notes.append("model.path: the directory or hub name of the model")
    if model_type(path) == "gpt2" and not given["disable_dropout"]:
        out.notes.append("TRL trains GPT-2 with the dropout of its config.json, and nlgrpo without")
    own = given["activation_checkpointing"]
    out.set("model.activation_checkpointing", given["gradient_checkpointing"] if own is None else own)
    out.set("model.compile", given["torch_compile"])
    _dtype(given, out)


def _dtype(given: Mapping[str, Any], out: Converted) -> None:
    """TRL stores weights in ``dtype`` and computes in bfloat16 unless ``bf16`` is false; nlgrpo stores float32."""
    kwargs = _table("model_init_kwargs", given["model_init_kwargs"])
    stored = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or given["torch_dtype"] or given["dtype"]
    stored = str(stored).removeprefix("torch.")
    for name, value in kwargs.items():
        out.drop(f"model_init_kwargs.{name}", value, "models are read from model.path")
    bf16 = not given["fp16"] if given["bf16"] is None else given["bf16"]
    if stored == "bfloat16":
        out.set("model.dtype", "bfloat16")
        out.notes.append("model.dtype: TRL also stores the weights in bfloat16; here the master weights are float32")
    elif stored == "float16":
        out.drop("dtype", "float16", "model.dtype is bfloat16 or float32")
    elif not bf16 and not given["fp16"]:
        out.set("model.dtype", "float32")
        if stored == "auto":
            out.notes.append("model.dtype: TRL computes in the dtype of the stored weights")
    if stored not in ("float32", "bfloat16", "float16", "auto", "None"):
        raise UserError(f"dtype = {stored!r}: expected auto, bfloat16, float16 or float32")


def _table(name: str, value: Any) -> dict[str, Any]:
    """A dictionary, also as JSON text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{name} = {value!r} is not JSON: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UserError(f"{name} = {value!r}: expected a table, such as {{key: value}}")
    return dict(found)


def _data(given: Mapping[str, Any], out: Converted) -> None:
    name = given["dataset_name"]
    config = given["dataset_config"]
    split = given["dataset_train_split"]
    streaming = given["dataset_streaming"]
    if given["datasets"]:
        name, config, split = _mixture(given["datasets"], out)
        streaming = given["streaming"]
    if name:
        out.set("data.source", _source(name, config, out))
        out.set("data.split", split)
    else:
        out.notes.append("data.source: a file or the name of a data set with a column prompt")
    out.set("data.shuffle", given["shuffle_dataset"])
    out.set("data.streaming", streaming)
    out.set("data.chat_template_kwargs", _table("chat_template_kwargs", given["chat_template_kwargs"]))
    if given["dataset_prompt_column"]:
        out.set("data.prompt_column", given["dataset_prompt_column"])
    if given["system_prompt"]:
        out.set("data.system_prompt", given["system_prompt"])
    if given["max_prompt_length"]:
        out.set("data.max_prompt_tokens", given["max_prompt_length"])
        out.notes.append("data.max_prompt_tokens: longer prompts are dropped; TRL cut their beginning")


def _source(name: str, config: str | None, out: Converted) -> str:
    """``name``, with the configuration of a data set on the hub."""
    if not config:
        return name
    if Path(name).exists():
        out.drop("dataset_config", config, f"{name} is a local path")
        return name
    return f"{name}:{config}"


def _mixture(parts: Any, out: Converted) -> tuple[str, str | None, str]:
    """Name, configuration and split of the only entry of ``datasets``; several are noted."""
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise UserError(f"datasets = {parts!r}: expected a list of tables with path, name, split")
    if len(parts) > 1:
        names = ", ".join(str(part.get("path")) for part in parts)
        out.notes.append(f"datasets: TRL concatenates {names}; join them in one file, or weigh them in data.mixture")
        return "", None, "train"
    [part] = parts
    for key in sorted(part.keys() - {"path", "name", "split"}):
        out.drop(f"datasets.{key}", part[key], "nlgrpo reads the whole split; see data.limit and data.prompt_column")
    return str(part.get("path") or ""), part.get("name"), part.get("split") or "train"


def _evaluation(given: Mapping[str, Any], out: Converted) -> None:
    """TRL evaluates only with an ``eval_strategy``; nlgrpo would hold out the last prompts of the source."""
    if given["num_generations_eval"]:
        samples = given["num_generations_eval"]
        out.set("evaluation.samples", samples)
        out.set("evaluation.ns", [n for n in schema.EvaluationConfig().ns if n <= samples])
    strategy = given["evaluation_strategy"] or given["eval_strategy"]
    if strategy in ("no", False):
        out.set("evaluation.prompts", 0)
        out.notes.append("evaluation.prompts: 0, because eval_strategy is 'no'; above 0 evaluates before and after")
        if given["load_best_model_at_end"]:
            out.drop("load_best_model_at_end", True, "needs an eval_strategy, as in TRL")
        return
    _evaluation_steps(strategy, given, out)
    if given[EVALUATION] is None:  # TRL's own script
        name = given["dataset_name"]
        config = given["dataset_config"]
        split = given["dataset_test_split"]
    else:
        name = given[EVALUATION].get("dataset_name")
        config = given[EVALUATION].get("dataset_config")
        split = given[EVALUATION].get("dataset_train_split")
    if name:
        out.set("data.evaluation", _source(name, config, out))
        out.set("data.evaluation_split", split)
    out.notes.append("evaluation.prompts: the number; TRL evaluates on all prompts")


def _evaluation_steps(strategy: object, given: Mapping[str, Any], out: Converted) -> None:
    """TRL evaluates every ``eval_steps`` optimizer steps, by default every ``logging_steps``."""
    steps = given["logging_steps"] if given["eval_steps"] is None else given["eval_steps"]
    if strategy != "steps":
        out.drop("eval_strategy", strategy, "evaluation.every counts steps; set it, or 0 for before and after only")
    elif steps < 1 and given["max_steps"] <= 0:
        out.notes.append(f"evaluation.every: {steps:g} of train.steps")
    else:
        steps = math.ceil(given["max_steps"] * steps) if steps < 1 else int(steps)
        out.set("evaluation.every", _rollouts("evaluation.every", steps, given, out))
    if not given["load_best_model_at_end"]:
        return
    metric = given["metric_for_best_model"] or "loss"
    name = str(metric).removeprefix("eval_")
    smaller = given["greater_is_better"] is False or (given["greater_is_better"] is None and name.endswith("loss"))
    if not out.keys.get("evaluation", {}).get("every"):
        out.notes.append("train.keep_best: needs evaluation.every")
    elif name in ("reward", "completions/mean_length") or re.fullmatch("rewards/.+/mean", name):
        out.set("train.keep_best", f"min:{name}" if smaller else name)
    else:
        out.drop(
            "metric_for_best_model", metric, "evaluations have rewards, objectives and lengths; see train.keep_best"
        )


# --- sampling and saving ----------------------------------------------------------------------------------------------


def _sampling(given: Mapping[str, Any], out: Converted) -> None:
    if given["max_completion_length"] is None:
        out.notes.append("rollout.max_new_tokens: TRL has no limit, and nlgrpo needs one")
    else:
        out.set("rollout.max_new_tokens", given["max_completion_length"])
    out.set("rollout.temperature", given["temperature"])
    out.set("rollout.top_p", given["top_p"])
    out.set("rollout.top_k", max(given["top_k"] or 0, 0))  # -1 is off, too
    out.set("rollout.min_p", given["min_p"] or 0.0)
    if given["use_vllm"]:
        _vllm(given, out)


def _vllm(given: Mapping[str, Any], out: Converted) -> None:
    out.set("rollout.engine", "vllm")
    if given["vllm_mode"] == "server":
        host = given["vllm_server_host"]
        if host == "0.0.0.0":
            host = "127.0.0.1"
        out.set("vllm.servers", [given["vllm_server_base_url"] or f"http://{host}:{given['vllm_server_port']}"])
        out.notes.append("vllm.servers: TRL's server is another one; start vLLM's own as the guide says")
    elif given["vllm_mode"] == "colocate":
        out.set("vllm.tensor_parallel", given["vllm_tensor_parallel_size"])
        out.set("vllm.gpu_memory", given["vllm_gpu_memory_utilization"])
        out.set("vllm.sleep", given["vllm_enable_sleep_mode"])
    else:
        raise UserError(f"vllm_mode = {given['vllm_mode']!r}: expected server or colocate")
    if given.get("vllm_importance_sampling_correction"):  # not in RLOOConfig
        _correction(given, out)


def _correction(given: Mapping[str, Any], out: Converted) -> None:
    level, _, kind = str(given["vllm_importance_sampling_mode"]).partition("_")
    low = given["vllm_importance_sampling_clip_min"] or 0.0
    high = given["vllm_importance_sampling_cap"] or given["vllm_importance_sampling_clip_max"]
    if kind not in ("truncate", "mask") or level not in ("token", "sequence"):
        mode = given["vllm_importance_sampling_mode"]
        raise UserError(f"vllm_importance_sampling_mode = {mode!r}: expected such as 'sequence_mask'")
    if kind == "truncate" and low > 0:
        out.drop("vllm_importance_sampling_clip_min", low, "truncation has an upper bound only")
    if high is None:
        out.notes.append("loss.correction: no upper limit")
        high = float("inf")
    out.set("loss.correction", f"tis:{high:g}" if kind == "truncate" else f"mis:{low:g}:{high:g}")
    out.set("loss.correction_level", level)
    if level == "sequence":
        out.notes.append("loss.correction: completions are weighted in the objectives, too; in TRL in the loss only")


def _saving(given: Mapping[str, Any], out: Converted) -> None:
    if given["output_dir"]:
        out.set("train.out", str(given["output_dir"]))
    out.set("train.seed", given["seed"])
    out.set("train.deterministic", given["full_determinism"])
    _checkpoints(given, out)
    if not isinstance(given["report_to"], str | list | tuple | None) and given["report_to"] is not False:
        raise UserError(f"report_to = {given['report_to']!r}: expected names of trackers")
    names = [given["report_to"]] if isinstance(given["report_to"], str) else list(given["report_to"] or [])
    supported = validate.TRACKERS
    if names == ["all"]:  # that are installed
        names = [name for name in supported if not validate.tracker_faults([name])]
    names = ["comet" if name == "comet_ml" else name for name in names if name != "none"]
    for name in names:
        if name not in supported:
            out.drop("report_to", name, f"the trackers are {', '.join(supported)}")
    out.set("train.track", [name for name in names if name in supported])
    if names:
        out.set("train.project", given["project"])
    if given["push_to_hub"] and given["hub_model_id"]:
        out.set("train.push", given["hub_model_id"])
    elif given["push_to_hub"]:
        out.notes.append("train.push: USER/NAME on the Hub")
    if given["run_name"]:
        out.set("train.run_name", given["run_name"])


def _checkpoints(given: Mapping[str, Any], out: Converted) -> None:
    strategy = given["save_strategy"]
    every = given["save_steps"]
    if strategy in ("no", False):
        out.set("train.checkpoint_every", 0)
        return
    if strategy != "steps":
        out.drop("save_strategy", strategy, "train.checkpoint_every counts steps")
    if 0 < every < 1 and given["max_steps"] <= 0:
        out.notes.append(f"train.checkpoint_every: {every:g} of train.steps")
        return
    steps = math.ceil(given["max_steps"] * every) if every < 1 else int(every)
    rollouts = _rollouts("train.checkpoint_every", steps, given, out)
    out.set("train.checkpoint_every", rollouts)
    if given["save_total_limit"]:
        out.set("train.keep_checkpoints", given["save_total_limit"])
    else:
        out.set("train.keep_every", rollouts)  # TRL keeps all


# --- loss and optimizer -----------------------------------------------------------------------------------------------


def _optimizer(given: Mapping[str, Any], out: Converted) -> None:
    schedule = str(given["lr_scheduler_type"])
    if schedule in SCHEDULES:
        out.set("optim.schedule", SCHEDULES[schedule])
        if given["updates"] > 1 and schedule != "constant":
            out.notes.append("optim.schedule: the rate changes with each rollout, and in TRL with each optimizer step")
    else:
        out.drop("lr_scheduler_type", schedule, f"schedules: {', '.join(SCHEDULES)}; this run has 'constant'")
    if given["optim"] not in ADAMW:
        out.drop("optim", given["optim"], "this run has AdamW; see optim.algorithm")
    out.set("optim.lr", given["learning_rate"])
    out.set("optim.betas", [given["adam_beta1"], given["adam_beta2"]])
    out.set("optim.eps", given["adam_epsilon"])
    out.set("optim.weight_decay", given["weight_decay"])
    out.set("optim.max_grad_norm", given["max_grad_norm"])


def _grpo(given: Mapping[str, Any], out: Converted) -> None:
    _clip(given, out)
    out.set("loss.beta", given["beta"])
    out.set("loss.scale", _scale(given["scale_rewards"], out))
    out.set("loss.level", given["importance_sampling_level"])
    if not given["use_bias_correction_kl"]:
        out.set("loss.kl_importance", False)
    if given["multi_objective_aggregation"] != "sum_then_normalize":
        reason = "rewards are summed; loss.aggregate joins objectives"
        out.drop("multi_objective_aggregation", given["multi_objective_aggregation"], reason)


def _clip(given: Mapping[str, Any], out: Converted) -> None:
    kind = given["loss_type"]
    high = given["epsilon_high"]
    delta = given["delta"]
    high = given["epsilon"] if high is None else high
    out.set("loss.eps_low", given["epsilon"])
    if kind == "cispo":
        out.set("loss.surrogate", "cispo")
        out.set("loss.normalization", "dapo")
        if high > 1:
            out.set("loss.eps_high", high - 1)  # TRL's is the cap itself
        else:
            out.drop("epsilon_high", high, "with cispo it caps the ratio, and loss.eps_high = cap - 1 is above 0")
    else:
        out.set("loss.eps_high", high)
        if kind in ("grpo", "bnpo", "dapo", "dr_grpo"):
            out.set("loss.normalization", kind)
        else:
            out.drop("loss_type", kind, "this run has the loss 'dapo'")
    if delta is None:
        return
    if kind == "cispo" or delta <= 1 + high:
        out.drop("delta", delta, "loss.dual_clip is for losses with a clip, and above 1 + loss.eps_high")
    else:
        out.set("loss.dual_clip", delta)


def _scale(value: Any, out: Converted) -> str:
    text = str(value).lower()
    scale = {"true": "group", "false": "none"}.get(text, text)
    if scale not in ("group", "batch", "none"):
        raise UserError(f"scale_rewards = {value!r}: expected group, batch or none")
    if scale == "batch":
        out.notes.append("loss.scale = 'batch': here the std of the advantages of a step, in TRL that of its rewards")
    return scale


def _rloo(given: Mapping[str, Any], out: Converted) -> None:
    """REINFORCE with a leave-one-out baseline, and with the KL of a completion in its reward (Ahmadian et al. 2024).

    TRL's loss is the mean over completions of the sum over their tokens. "dr_grpo" divides that by max_new_tokens; with
    the gradient, the clip of its norm and AdamW's eps are divided, so that the optimizer's steps are the same.
    """
    out.set("loss.baseline", "loo")
    out.set("loss.scale", "batch" if given["normalize_advantages"] else "none")
    out.set("loss.beta", given["beta"])
    if given["beta"] > 0:
        out.set("loss.kl_in", "reward")
    out.set("loss.normalization", "dr_grpo")
    if given["updates"] == 1:  # the ratio of TRL's loss is 1
        out.set("loss.surrogate", "reinforce")
    else:
        high = given["epsilon_high"]
        out.set("loss.eps_low", given["epsilon"])
        out.set("loss.eps_high", given["epsilon"] if high is None else high)
        out.notes.append("loss.level: TRL's RLOO clips the ratio of a completion, and this run that of each token")
    if length := given["max_completion_length"]:
        out.set("optim.max_grad_norm", given["max_grad_norm"] / length)
        out.set("optim.eps", given["adam_epsilon"] / length)
        out.notes.append(
            f"optim.max_grad_norm, optim.eps: those of TRL / {length}, because its loss is the sum over tokens and "
            "loss.normalization = 'dr_grpo' divides it by rollout.max_new_tokens"
        )


# --- rewards ----------------------------------------------------------------------------------------------------------


def _rewards(given: Mapping[str, Any], out: Converted) -> None:
    """Write a table for each reward. Raises UserError for weights that are not one number for each."""
    functions = given["reward_funcs"] or []
    if not isinstance(functions, str | list | tuple):
        raise UserError(f"reward_funcs = {functions!r}: expected names of functions")
    if isinstance(functions, str):
        functions = [functions]
    rewards = [_reward(one) for one in functions]
    if path := given["reward_model_name_or_path"]:
        rewards.insert(0, Reward("classifier", f"classifier(path={path!r})"))
    weights = _weights(given["reward_weights"], len(rewards))
    for name, reward, weight in zip(_reward_names(rewards), rewards, weights, strict=True):
        out.set(f"rewards.{name}.function", reward.function)
        out.set(f"rewards.{name}.objective", "mean")  # the expected reward
        if weight != 1:
            out.set(f"rewards.{name}.weight", weight)
        if reward.note:
            out.notes.append(f"rewards.{name}.function: {reward.note}")
    if not rewards:
        out.notes.append("rewards: a table [rewards.NAME] with function and objective")


def _weights(given: Any, rewards: int) -> list[float]:
    if given is None:
        return [1.0] * rewards
    weights = list(given) if isinstance(given, list | tuple) else [given]
    if rewards and len(weights) != rewards:
        raise UserError(f"reward_weights has {len(weights)} values for {rewards} rewards; give one for each")
    return [trl_options.typed("reward_weights", weight, WEIGHT) for weight in weights][:rewards]


def _reward(given: Any) -> Reward:
    """A reward of a script, or one named in TRL's way: a function of its own, or a dotted path."""
    reward = given if isinstance(given, Reward) else Reward(str(given).rpartition(".")[2], str(given))
    if ":" in reward.function or "(" in reward.function:
        return reward
    module, _, name = reward.function.rpartition(".")
    if name in BUILTIN and (not module or module.split(".")[0] == "trl"):
        function = BUILTIN[name]
        return Reward(function.partition("(")[0].rpartition(":")[2], function)
    if module:
        return Reward(name, f"{module}:{name}")
    return Reward(name, f"rewards.py:{name}", f"the file of {name}")


def _reward_names(rewards: Sequence[Reward]) -> list[str]:
    """A name for each reward: that of its function; with the module or a number where several have it."""
    own = [re.sub(r"\W", "_", reward.name).strip("_") or "reward" for reward in rewards]
    names = list[str]()
    for name, reward in zip(own, rewards, strict=True):
        module = reward.function.partition("(")[0].rpartition(":")[0].removesuffix(".py")
        if own.count(name) > 1 and module:
            name = re.sub(r"\W", "_", f"{module}_{name}").strip("_")
        unique = name[-60:]
        number = 1
        while unique in names:
            number += 1
            unique = f"{name[-60:]}_{number}"
        names.append(unique)
    return names


# --- adapters ---------------------------------------------------------------------------------------------------------


def _adapters(given: Mapping[str, Any], out: Converted) -> None:
    """Write the section [lora], if the run has adapters."""
    if given[PEFT] is not None:
        keys = _of_peft(given[PEFT], out)
    elif given["use_peft"]:
        keys = {
            "r": given["lora_r"],
            "lora_alpha": given["lora_alpha"],
            "lora_dropout": given["lora_dropout"],
            "use_rslora": given["use_rslora"],
            "target_modules": given["lora_target_modules"],
            "modules_to_save": given["lora_modules_to_save"],
        }
    else:
        return
    out.set("lora.rank", keys["r"])
    out.set("lora.alpha", float(keys["lora_alpha"]))
    out.set("lora.dropout", float(keys["lora_dropout"]))
    out.set("lora.rslora", keys["use_rslora"])
    path = given["model_name_or_path"] or given["model"]
    out.set("lora.target_modules", _modules("target_modules", keys) or _target_modules(path, out))
    out.set("lora.modules_to_save", _modules("modules_to_save", keys))


def _of_peft(options: Mapping[str, Any], out: Converted) -> dict[str, Any]:
    """Arguments of a LoraConfig with PEFT's defaults; those that set no key are listed."""
    known = trl_options.LORA
    keys = trl_options.defaults(known)
    for name, value in options.items():
        if name not in known:
            out.drop(f"LoraConfig.{name}", value, "not an argument of PEFT's LoraConfig (0.21)")
            continue
        keys[name] = trl_options.typed(f"LoraConfig.{name}", value, known[name])
        if not known[name].keys and keys[name] != known[name].default and name not in ("task_type", "inference_mode"):
            out.drop(f"LoraConfig.{name}", value, known[name].note)
    return keys


def _modules(name: str, keys: Mapping[str, Any]) -> list[str]:
    value = keys[name] or []
    if not isinstance(value, str | list | tuple | set):
        raise UserError(f"{name} = {value!r}: expected names of modules")
    if isinstance(value, str):
        return [value]
    return [str(module) for module in (sorted(value) if isinstance(value, set) else value)]


def _target_modules(path: Any, out: Converted) -> list[str]:
    """PEFT's modules for the model. Its type is in its config.json; one that its name suggests is noted."""
    kind = model_type(path)
    if not (isinstance(path, str) and _config_of(path).is_file()):
        of = f"models of type {kind!r}, as the name suggests" if kind else "Llama, Mistral and Qwen"
        out.notes.append(f"lora.target_modules: PEFT's default for {of}; it depends on the type of the model")
    return list(TARGETS.get(kind, TARGETS["llama"]))


def model_type(path: Any) -> str:
    """The model_type in a directory's config.json, or what a name suggests; empty if nothing is known."""
    if not isinstance(path, str):
        return ""
    if _config_of(path).is_file():
        try:
            return str(json.loads(_config_of(path).read_text("utf-8"))["model_type"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{_config_of(path)} has no readable model_type: {error!r}") from error
    return next((kind for word, kind in WORDS.items() if word in path.lower()), "")


def _config_of(path: str) -> Path:
    return Path(path).expanduser() / "config.json"
