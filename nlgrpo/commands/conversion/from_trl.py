"""The command ``nlgrpo from-trl``: a configuration of TRL's ``GRPOTrainer`` as a TOML file of nlgrpo."""

from __future__ import annotations

import ast
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional

from nlgrpo.config import comparing, toml_file, validate

# Defaults of TRL 1.16.0 for the options that are converted.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": None,
    "generation_batch_size": None, "num_generations": 8, "num_iterations": 1, "max_steps": -1, "num_train_epochs": 3.0,
    "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "seed": 42, "shuffle_dataset": True,
    "beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "delta": None, "loss_type": "dapo", "scale_rewards": "group",
    "importance_sampling_level": "token", "use_bias_correction_kl": True, "reward_weights": None,
    "gradient_checkpointing": True, "torch_compile": False, "save_steps": 500, "save_total_limit": None,
    "report_to": "none", "run_name": None, "output_dir": None, "use_vllm": False, "vllm_mode": "colocate",
    "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
    "vllm_tensor_parallel_size": 1, "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": False,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 3.0,
}  # fmt: skip
PROJECT = "huggingface"  # of TRL's trackers

# Options of the trainer, of its script and of PEFT that are read besides.
OTHERS = (
    "project", "model_name_or_path", "model", "dtype", "torch_dtype", "dataset_name", "dataset_train_split",
    "reward_funcs", "reward_model_name_or_path", "use_peft", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_modules", "lora_modules_to_save", "use_rslora", "num_processes", "activation_checkpointing",
    "push_to_hub", "hub_model_id", "chat_template_kwargs", "dataset_streaming",
)  # fmt: skip

# Options that change nothing in what is trained, or that nlgrpo does by itself.
NOT_NEEDED = (
    "bf16", "fp16", "tf32", "logging_steps", "logging_strategy", "logging_first_step", "log_completions",
    "num_completions_to_print", "dataloader_num_workers", "dataloader_pin_memory", "disable_tqdm", "eval_strategy",
    "eval_steps", "per_device_eval_batch_size", "num_generations_eval", "do_train", "do_eval", "overwrite_output_dir",
    "remove_unused_columns", "gradient_checkpointing_kwargs", "use_liger_kernel", "resume_from_checkpoint", "optim",
    "save_strategy", "save_only_model", "ds3_gather_for_generation", "ddp_timeout", "attn_implementation",
    "log_level", "hub_strategy", "trust_remote_code", "deepspeed", "fsdp", "fsdp_config", "vllm_max_model_length",
    "dataset_test_split", "disable_dropout",
)  # fmt: skip


@dataclass
class Converted:
    """The keys of nlgrpo that differ from its defaults, by section, and what could not be converted."""

    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """To check by hand."""
    missing: list[str] = field(default_factory=list)
    """Options without an equivalent."""

    def set(self, key: str, value: Any) -> None:
        section, _, name = key.rpartition(".")
        self.keys.setdefault(section, {})[name] = value

    def toml(self) -> str:
        """Return the TOML file, with the rest as comments."""
        lines = []
        for title, texts in (("Check", self.notes), ("Without an equivalent", self.missing)):
            lines += [f"# {title}: {text}" for text in texts]
        return "\n".join([*lines, "", toml_file.text(self.sections())]).strip() + "\n"

    def sections(self) -> dict[str, Any]:
        """Return the keys by section, those of a reward below the section rewards."""
        found: dict[str, Any] = {}
        for section, keys in self.keys.items():
            name, _, part = section.partition(".")
            target = found.setdefault(name, {})
            target.update({part: keys} if part else keys)
        return found


# --- reading TRL's configurations -------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read options from a YAML file, a Python script with ``GRPOConfig(..)``, or a file with a command line.

    Returns the options, and notes about what could not be read. Raises ValueError for a file without any.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    text = path.read_text("utf-8")
    if path.suffix in (".yaml", ".yml"):
        import yaml

        found = yaml.safe_load(text)
        options, notes = (found if isinstance(found, dict) else {}), list[str]()
    elif path.suffix == ".py":
        options, notes = _of_script(text)
    else:
        options, notes = _of_command(text), []
    if not options:
        raise ValueError(f"{path} has no options; give a YAML file, a script with GRPOConfig(..), or a command line")
    return options, notes


def _of_script(text: str) -> tuple[dict[str, Any], list[str]]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"not a Python script: {error}") from error
    options, notes = dict[str, Any](), list[str]()
    for node in ast.walk(tree):
        name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or name not in ("GRPOConfig", "GRPOTrainer", "LoraConfig"):
            continue
        for keyword in node.keywords:
            own = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
            key = own.get(keyword.arg or "", keyword.arg or "**") if name == "LoraConfig" else keyword.arg or "**"
            if name == "GRPOTrainer" and key not in ("model", "reward_funcs"):
                continue
            try:
                options[key] = ast.literal_eval(keyword.value)
            except ValueError:
                written = ast.unparse(keyword.value)
                if key == "reward_funcs":
                    options[key] = [part.strip() for part in written.strip("[]").split(",")]
                else:
                    notes.append(f"{key} = {written} is not a literal and was not read")
        if name == "LoraConfig":
            options["use_peft"] = True
    return options, notes


def _of_command(text: str) -> dict[str, Any]:
    tokens, options, key = shlex.split(text.replace("\\\n", " "), comments=True), dict[str, Any](), ""
    for token in tokens:
        if token.startswith("--"):
            key, given, value = token[2:].partition("=")
            key = key.replace("-", "_")
            options[key] = _literal(value) if given else True
        elif token.endswith(".py"):  # the launcher's options end here
            key = ""
        elif key:
            before = options[key]
            value = _literal(token)
            options[key] = value if before is True else [*(before if isinstance(before, list) else [before]), value]
    return options


def _literal(text: str) -> Any:
    known = {"true": True, "false": False, "none": None, "null": None}
    try:
        return known[text.lower()] if text.lower() in known else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# --- converting -------------------------------------------------------------------------------------------------------


def convert(options: Mapping[str, Any], world: int = 1) -> Converted:
    """Convert options of ``GRPOConfig``; those that are absent have TRL's defaults. ``world``: number of processes."""
    out, given = Converted(), {**DEFAULTS, **options}
    _batches(given, out, world)
    for part in (_model, _optimizer, _loss, _sampling, _saving, _rewards, _lora):
        part(given, out)
    kept = comparing.without_defaults({name: keys for name, keys in out.sections().items() if name != "rewards"})
    out.keys = {name: kept.get(name, keys) for name, keys in out.keys.items() if name in kept or "." in name}
    known = {*DEFAULTS, *OTHERS, *NOT_NEEDED}
    out.missing += [f"{key} = {value!r}" for key, value in options.items() if key not in known]
    return out


def _batches(given: Mapping[str, Any], out: Converted, world: int) -> None:
    """TRL counts completions per device, and optimizer steps; nlgrpo prompts of a rollout, and rollouts."""
    world = int(given.get("num_processes") or world)
    per_step = given["per_device_train_batch_size"] * world
    accumulated, samples = given["gradient_accumulation_steps"], given["num_generations"]
    steps = given["steps_per_generation"] or accumulated
    if given["generation_batch_size"]:
        steps = given["generation_batch_size"] // per_step
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
    if given["max_steps"] > 0:
        out.set("train.steps", max(1, given["max_steps"] // updates))
    else:
        epochs = given["num_train_epochs"]
        out.notes.append(f"train.steps: {epochs:g} epochs are {epochs:g} x (number of prompts) / {max(prompts, 1)}")
    out.set("optim.warmup_steps", _rollouts(given["warmup_steps"], updates, out))


def _rollouts(warmup: float, updates: int, out: Converted) -> int:
    if 0 < warmup < 1:
        out.notes.append(f"optim.warmup_steps: {warmup:g} of train.steps")
        return 0
    return int(warmup) // updates


def _model(given: Mapping[str, Any], out: Converted) -> None:
    path = given.get("model_name_or_path") or given.get("model")
    if isinstance(path, str):
        out.set("model.path", path)
    else:
        out.notes.append("model.path: the directory or hub name of the model")
    dtype = given.get("dtype") or given.get("torch_dtype")
    if dtype not in (None, "auto"):
        out.set("model.dtype", str(dtype).removeprefix("torch."))
    own = given.get("activation_checkpointing")
    out.set("model.activation_checkpointing", bool(given["gradient_checkpointing"] if own is None else own))
    out.set("model.compile", bool(given["torch_compile"]))
    if given.get("dataset_name"):
        out.set("data.source", given["dataset_name"])
        out.set("data.split", given.get("dataset_train_split") or "train")
    else:
        out.notes.append("data.source: a file or the name of a data set with a column prompt")
    out.set("data.shuffle", bool(given["shuffle_dataset"]))
    out.set("data.streaming", bool(given.get("dataset_streaming")))
    kwargs = given.get("chat_template_kwargs") or {}
    out.set("data.chat_template_kwargs", json.loads(kwargs) if isinstance(kwargs, str) else dict(kwargs))


def _optimizer(given: Mapping[str, Any], out: Converted) -> None:
    schedule = str(given["lr_scheduler_type"])
    known = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if schedule in known:
        out.set("optim.schedule", known[schedule])
    else:
        out.missing.append(f"lr_scheduler_type = {schedule!r}")
    out.set("optim.lr", float(given["learning_rate"]))
    out.set("optim.betas", [float(given["adam_beta1"]), float(given["adam_beta2"])])
    out.set("optim.eps", float(given["adam_epsilon"]))
    for key in ("weight_decay", "max_grad_norm"):
        out.set(f"optim.{key}", float(given[key]))


def _loss(given: Mapping[str, Any], out: Converted) -> None:
    kind, high = given["loss_type"], given["epsilon_high"]
    high = given["epsilon"] if high is None else high
    out.set("loss.beta", float(given["beta"]))
    out.set("loss.eps_low", float(given["epsilon"]))
    if kind == "cispo":
        out.set("loss.surrogate", "cispo")
        out.set("loss.normalization", "dapo")
        out.set("loss.eps_high", float(high) - 1)  # TRL's is the cap itself
    else:
        out.set("loss.eps_high", float(high))
        if kind in ("grpo", "bnpo", "dapo", "dr_grpo"):
            out.set("loss.normalization", kind)
        else:
            out.missing.append(f"loss_type = {kind!r}")
    if given["delta"] is not None:
        out.set("loss.dual_clip", float(given["delta"]))
    scale = {True: "group", False: "none", None: "none"}.get(given["scale_rewards"], given["scale_rewards"])
    out.set("loss.scale", scale)
    out.set("loss.level", given["importance_sampling_level"])
    out.set("loss.kl_importance", bool(given["use_bias_correction_kl"]))


def _sampling(given: Mapping[str, Any], out: Converted) -> None:
    out.set("rollout.max_new_tokens", given["max_completion_length"])
    for key in ("temperature", "top_p"):
        out.set(f"rollout.{key}", float(given[key]))
    out.set("rollout.top_k", int(given["top_k"] or 0))
    out.set("rollout.min_p", float(given["min_p"] or 0.0))
    if not given["use_vllm"]:
        return
    out.set("rollout.engine", "vllm")
    if given["vllm_mode"] == "server":
        host = {"0.0.0.0": "127.0.0.1"}.get(given["vllm_server_host"], given["vllm_server_host"])
        out.set("vllm.servers", [given["vllm_server_base_url"] or f"http://{host}:{given['vllm_server_port']}"])
        out.notes.append("vllm.servers: TRL's server is another one; start vLLM's own as the guide says")
    else:
        out.set("vllm.tensor_parallel", given["vllm_tensor_parallel_size"])
        out.set("vllm.gpu_memory", float(given["vllm_gpu_memory_utilization"]))
        out.set("vllm.sleep", bool(given["vllm_enable_sleep_mode"]))
    if given["vllm_importance_sampling_correction"]:
        level, _, kind = str(given["vllm_importance_sampling_mode"]).partition("_")
        low, high = given["vllm_importance_sampling_clip_min"] or 0.0, given["vllm_importance_sampling_clip_max"]
        if kind == "truncate" and low > 0:
            out.missing.append(f"vllm_importance_sampling_clip_min = {low:g} with truncation")
        if high is None:
            out.notes.append("loss.correction: no upper limit")
            high = float("inf")
        out.set("loss.correction", f"tis:{high:g}" if kind == "truncate" else f"mis:{low:g}:{high:g}")
        out.set("loss.correction_level", level)


def _saving(given: Mapping[str, Any], out: Converted) -> None:
    if given["output_dir"]:
        out.set("train.out", given["output_dir"])
    out.set("train.seed", given["seed"])
    out.set("train.checkpoint_every", int(given["save_steps"]))
    if given["save_total_limit"]:
        out.set("train.keep_checkpoints", given["save_total_limit"])
    to = given["report_to"]
    names = [to] if isinstance(to, str) else list(to or [])
    supported = validate.TRACKERS
    names = list(supported) if names == ["all"] else [name for name in names if name != "none"]
    out.missing += [f"report_to = {name!r}" for name in names if name not in supported]
    out.set("train.track", [name for name in names if name in supported])
    if names:
        out.set("train.project", given.get("project") or PROJECT)
    if given.get("push_to_hub") and given.get("hub_model_id"):
        out.set("train.push", given["hub_model_id"])
    elif given.get("push_to_hub"):
        out.notes.append("train.push: USER/NAME on the Hub")
    if given["run_name"]:
        out.set("train.run_name", given["run_name"])


# TRL's own functions, by the names of its script.
BUILTIN = {
    "accuracy_reward": "math(column='solution')",
    "get_soft_overlong_punishment": "overlong(limit=1280, margin=256)",
    "think_format_reward": "trl.rewards:think_format_reward",
    "reasoning_accuracy_reward": "trl.rewards:reasoning_accuracy_reward",
}


def _rewards(given: Mapping[str, Any], out: Converted) -> None:
    functions = given.get("reward_funcs") or []
    names = [functions] if isinstance(functions, str) else [str(name) for name in functions]
    path = given.get("reward_model_name_or_path")
    specs = [f"classifier(path='{path}')"] if path else []
    for name in names:
        module, _, function = name.rpartition(".")
        specs.append(BUILTIN.get(name) or (f"{module}:{function}" if module else f"rewards.py:{name}"))
        if not module and name not in BUILTIN:
            out.notes.append(f"rewards.{name}.function: the file of {name}")
    weights = given["reward_weights"] or [1.0] * len(specs)
    for spec, weight in zip(specs, weights, strict=False):
        name = spec.partition("(")[0].rpartition(":")[2].replace(".", "_").lstrip("_") or "reward"
        out.set(f"rewards.{name}.function", spec)
        out.set(f"rewards.{name}.objective", "mean")  # plain GRPO
        if weight != 1:
            out.set(f"rewards.{name}.weight", float(weight))
    if not specs:
        out.notes.append("rewards: a table [rewards.NAME] with function and objective")


def _lora(given: Mapping[str, Any], out: Converted) -> None:
    if not given.get("use_peft"):
        return
    out.set("lora.rank", given.get("lora_r") or 16)
    out.set("lora.alpha", float(given.get("lora_alpha") or 32))
    out.set("lora.dropout", float(given.get("lora_dropout", 0.05)))
    modules: Callable[[Any], list[str]] = lambda x: [x] if isinstance(x, str) else list(x)  # noqa: E731
    if given.get("lora_target_modules"):
        out.set("lora.target_modules", modules(given["lora_target_modules"]))
    if given.get("lora_modules_to_save"):
        out.set("lora.modules_to_save", modules(given["lora_modules_to_save"]))
    out.set("lora.rslora", bool(given.get("use_rslora")))


@dataclass
class FromTRL:
    """Print the nlgrpo configuration that corresponds to one of TRL's GRPOTrainer (1.16).

    Values that TRL has by default and nlgrpo does not are written out. What has no equivalent, and what must be
    checked by hand, is in comments at the top. The objective of each reward is "mean", plain GRPO: choose your own.
    """

    file: Positional[Path]
    """YAML file of ``trl grpo --config``, Python script with ``GRPOConfig(..)``, or a text file with a command line."""
    processes: int = 1
    """Number of processes of the TRL run; its batch sizes are per process."""
    out: Path | None = None
    """TOML file to write. None: standard output."""


def main(arguments: Sequence[str]) -> int:
    """Convert and print."""
    options = tyro.cli(FromTRL, args=list(arguments), prog="nlgrpo from-trl")
    given, notes = read(options.file)
    converted = convert(given, options.processes)
    converted.notes[:0] = notes
    if options.out is None:
        sys.stdout.write(converted.toml())
        return 0
    if options.out.exists():
        raise ValueError(f"{options.out} exists")
    options.out.write_text(converted.toml(), "utf-8")
    print(options.out)
    return 0
