"""The command ``nlgrpo from-trl``: a run of TRL's ``GRPOTrainer`` or ``RLOOTrainer`` as a TOML file of nlgrpo."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import Positional

from nlgrpo.apps.convert import trl_lora, trl_loss, trl_options, trl_rewards
from nlgrpo.apps.convert.trl_files import read
from nlgrpo.apps.convert.trl_output import Converted
from nlgrpo.apps.convert.trl_script import EVALUATION, KIND, PEFT
from nlgrpo.config import comparing, schema, validate
from nlgrpo.errors import UserError

# Options that choose the trainer where a file does not name it.
ONLY_RLOO = trl_options.RLOO.keys() - trl_options.GRPO.keys()
AT_LEAST_ONE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_generations", "num_iterations", "num_processes",
)  # fmt: skip


def convert(options: Mapping[str, Any], world: int = 1) -> Converted:
    """Convert options of TRL; those that are absent have TRL's defaults. ``world``: number of processes.

    Raises UserError for values that TRL refuses.
    """
    if world < 1:
        raise UserError(f"processes = {world}: expected at least 1")
    trainer = options.get(KIND) or ("rloo" if ONLY_RLOO & options.keys() else "grpo")
    known = trl_options.known(trainer)
    typed = {name: trl_options.typed(name, value, known[name]) for name, value in options.items() if name in known}
    given = {**trl_options.defaults(known), **typed, **{name: options.get(name) for name in (KIND, PEFT, EVALUATION)}}
    for name in AT_LEAST_ONE:
        if given[name] is not None and given[name] < 1:
            raise UserError(f"{name} = {given[name]}: expected at least 1")
    for name in ("warmup_steps", "warmup_ratio", "save_steps"):
        if not 0 <= given[name] < math.inf:
            raise UserError(f"{name} = {given[name]}: expected a number of steps, or a share of them below 1")
    out = Converted()
    _batches(given, out, world)
    _model(given, out)
    _data(given, out)
    trl_loss.optimizer(given, out)
    if trainer == "rloo":
        trl_loss.rloo(given, out)
    else:
        trl_loss.grpo(given, out)
    for part in (_sampling, _saving, _evaluation, trl_rewards.convert, trl_lora.convert):
        part(given, out)
    steps = out.keys.get("train", {}).get("steps")  # written also if it is the default
    kept = comparing.without_defaults({name: keys for name, keys in out.sections().items() if name != "rewards"})
    out.keys = {name: kept.get(name, keys) for name, keys in out.keys.items() if name in kept or "." in name}
    if given["max_steps"] > 0:
        out.set("train.steps", steps)
    schema.from_dict(out.sections(), where="the converted configuration")
    _leftover(options, known, out, f"{trainer.upper()}Config")
    return out


def _leftover(options: Mapping[str, Any], known: Mapping[str, trl_options.Option], out: Converted, of: str) -> None:
    """List the options that set no key of nlgrpo, unless they have TRL's default."""
    for name, value in options.items():
        if name in (KIND, PEFT, EVALUATION):
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            out.drop(name, value, f"not an option of {of} or TRL's scripts (1.16){hint}")
        elif not known[name].keys and not _is_default(name, value, known[name]):
            out.drop(name, value, known[name].note)


def _is_default(name: str, value: Any, option: trl_options.Option) -> bool:
    return bool(trl_options.typed(name, value, option) == option.default)


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
    given["updates"] = updates = max(minibatches, 1) * given["num_iterations"]
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
    if trl_lora.model_type(path) == "gpt2" and not given["disable_dropout"]:
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
    if config and Path(name).exists():
        out.drop("dataset_config", config, f"{name} is a local path")
        return name
    return f"{name}:{config}" if config else name


def _mixture(parts: Any, out: Converted) -> tuple[str, str | None, str]:
    """Name, configuration and split of the only entry of ``datasets``; several are noted."""
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise UserError(f"datasets = {parts!r}: expected a list of tables with path, name, split")
    if len(parts) > 1:
        names = ", ".join(str(part.get("path")) for part in parts)
        out.notes.append(f"datasets: TRL concatenates {names}; join them in one file, or weigh them in data.mixture")
        return "", None, "train"
    [part] = parts
    own = {"path", "name", "split"}
    for key in sorted(part.keys() - own):
        out.drop(f"datasets.{key}", part[key], "nlgrpo reads the whole split; see data.limit and data.prompt_column")
    return str(part.get("path") or ""), part.get("name"), part.get("split") or "train"


def _evaluation(given: Mapping[str, Any], out: Converted) -> None:
    """TRL evaluates only with an ``eval_strategy``; nlgrpo would hold out the last prompts of the source."""
    if given["num_generations_eval"]:
        samples = given["num_generations_eval"]
        out.set("evaluation.samples", samples)
        out.set("evaluation.ns", [n for n in schema.EvaluationConfig().ns if n <= samples])
    if (given["evaluation_strategy"] or given["eval_strategy"]) in ("no", False):
        out.set("evaluation.prompts", 0)
        out.notes.append("evaluation.prompts: 0, because eval_strategy is 'no'; above 0 evaluates before and after")
        return
    if given[EVALUATION] is None:  # TRL's own script
        name = given["dataset_name"]
        config = given["dataset_config"]
        split = given["dataset_test_split"]
    else:
        name, config, split = (given[EVALUATION].get(f"dataset_{key}") for key in ("name", "config", "train_split"))
    if name:
        out.set("data.evaluation", _source(name, config, out))
        out.set("data.evaluation_split", split)
    out.notes.append("evaluation.prompts: the number, before and after training; TRL evaluates on all prompts")


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
        host = {"0.0.0.0": "127.0.0.1"}.get(given["vllm_server_host"], given["vllm_server_host"])
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
    names = list(supported) if names == ["all"] else [name for name in names if name != "none"]
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


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass
class FromTRL:
    """Print the nlgrpo configuration that corresponds to one of TRL's GRPOTrainer or RLOOTrainer (1.16).

    Values that TRL has by default and nlgrpo does not are written out. What is not carried over, and what must be
    checked by hand, is in comments at the top. The objective of each reward is "mean", as in TRL: choose your own.
    """

    file: Positional[Path]
    """YAML file of ``trl grpo --config``, Python script with ``GRPOConfig(..)``, or a text file with a command line."""
    processes: int = 1
    """Number of processes of the TRL run; its batch sizes are per process."""
    trainer: Literal["auto", "grpo", "rloo"] = "auto"
    """TRL's trainer. auto: as the file says; a YAML file that does not say so is of GRPOTrainer."""
    out: Path | None = None
    """TOML file to write. None: standard output."""


def main(arguments: Sequence[str]) -> int:
    """Convert and print."""
    options = tyro.cli(FromTRL, args=list(arguments), prog="nlgrpo from-trl")
    given, notes = read(options.file)
    if options.trainer != "auto":
        given[KIND] = options.trainer
    converted = convert(given, options.processes)
    converted.notes[:0] = notes
    if options.out is None:
        sys.stdout.write(converted.toml())
        return 0
    if options.out.exists():
        raise UserError(f"{options.out} exists; name another file, or remove it")
    options.out.write_text(converted.toml(), "utf-8")
    print(options.out)
    return 0
