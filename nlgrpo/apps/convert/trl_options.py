"""Every option of a TRL run (TRL 1.16, PEFT 0.21), with the keys of nlgrpo that it sets or the reason why it sets none.

Tests compare the names and defaults with the installed classes, and docs/migrating-from-trl.md with these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nlgrpo.errors import UserError


@dataclass(frozen=True)
class Option:
    """An option of TRL. It sets ``keys`` of nlgrpo, or none for the reason in ``note``."""

    default: Any
    note: str
    keys: str = ""
    kind: type = object
    """Type to which a text is converted, as argparse does in TRL; object: any value, unchanged."""


def _mapped(kind: type, **options: tuple[Any, ...]) -> dict[str, Option]:
    """Options with their default, keys and, where something differs, a note."""
    return {name: Option(own[0], own[2] if len(own) > 2 else "", own[1], kind) for name, own in options.items()}


def _without(note: str, **defaults: Any) -> dict[str, Option]:
    """Options that set nothing, all for the same reason."""
    return {name: Option(default, note, kind=_kind(default)) for name, default in defaults.items()}


def _kind(default: Any) -> type:
    if isinstance(default, bool):
        return bool
    return float if isinstance(default, int | float) else object


BATCH = "completions of a generation batch, over all processes, divided by `num_generations`"
MINIBATCHES = "optimizer steps per pass over a rollout"
SERVER = "vLLM's own server is started instead of TRL's"

# GRPOConfig with its ancestors.
GRPO: dict[str, Option] = {
    **_mapped(
        int,
        per_device_train_batch_size=(8, "rollout.prompts", BATCH),
        gradient_accumulation_steps=(1, "rollout.prompts, loss.minibatches", BATCH),
        steps_per_generation=(None, "rollout.prompts, loss.minibatches", MINIBATCHES),
        generation_batch_size=(None, "rollout.prompts, loss.minibatches", MINIBATCHES),
        num_generations=(8, "rollout.samples"),
        num_generations_eval=(None, "evaluation.samples"),
        num_iterations=(1, "loss.epochs"),
        max_steps=(-1, "train.steps", "counts rollouts, not optimizer steps"),
        max_completion_length=(512, "rollout.max_new_tokens"),
        top_k=(0, "rollout.top_k"),
        seed=(42, "train.seed"),
        save_total_limit=(None, "train.keep_checkpoints, train.keep_every", "None keeps all, as keep_every does"),
        vllm_server_port=(8000, "vllm.servers", SERVER),
        vllm_tensor_parallel_size=(1, "vllm.tensor_parallel"),
    ),
    **_mapped(
        float,
        num_train_epochs=(3.0, "train.steps", "a comment: the number of prompts is not known"),
        temperature=(1.0, "rollout.temperature"),
        top_p=(1.0, "rollout.top_p"),
        min_p=(None, "rollout.min_p"),
        learning_rate=(1e-6, "optim.lr"),
        warmup_steps=(0, "optim.warmup_steps", "counts rollouts; below 1 a share of all steps"),
        weight_decay=(0.0, "optim.weight_decay"),
        adam_beta1=(0.9, "optim.betas"),
        adam_beta2=(0.999, "optim.betas"),
        adam_epsilon=(1e-8, "optim.eps"),
        max_grad_norm=(1.0, "optim.max_grad_norm"),
        beta=(0.0, "loss.beta", "0: no reference model, as in TRL; `loss.log_kl_every` loads it to log the KL"),
        epsilon=(0.2, "loss.eps_low"),
        epsilon_high=(None, "loss.eps_high", "with `cispo`, TRL's is the cap itself, 1 + `eps_high`"),
        delta=(None, "loss.dual_clip"),
        save_steps=(500, "train.checkpoint_every", "counts rollouts; below 1 a share of all steps"),
        eval_steps=(None, "evaluation.every", "counts rollouts; below 1 a share of all steps"),
        vllm_gpu_memory_utilization=(0.3, "vllm.gpu_memory"),
        vllm_importance_sampling_clip_min=(None, "loss.correction", "masks only"),
        vllm_importance_sampling_clip_max=(3.0, "loss.correction"),
        vllm_importance_sampling_cap=(None, "loss.correction", "the earlier name of `.._clip_max`"),
    ),
    **_mapped(
        bool,
        shuffle_dataset=(True, "data.shuffle"),
        use_bias_correction_kl=(True, "loss.kl_importance"),
        gradient_checkpointing=(True, "model.activation_checkpointing"),
        activation_checkpointing=(None, "model.activation_checkpointing"),
        torch_compile=(False, "model.compile", "the blocks, except their attention"),
        bf16=(None, "model.dtype", "true: bfloat16 on a GPU with float32 master weights; false: float32"),
        load_best_model_at_end=(False, "train.keep_best", "the best is in RUN/best beside the last"),
        greater_is_better=(None, "train.keep_best", "false: `min:` before the metric"),
        push_to_hub=(False, "train.push", "at the end, with a card and the report"),
        full_determinism=(False, "train.deterministic"),
        use_vllm=(False, "rollout.engine"),
        vllm_enable_sleep_mode=(False, "vllm.sleep"),
        vllm_importance_sampling_correction=(True, "loss.correction", "for every sampler, also in the objectives"),
    ),
    **_mapped(
        str,
        lr_scheduler_type=("linear", "optim.schedule", "linear, cosine, constant, constant_with_warmup"),
        optim=("adamw_torch_fused", "optim.algorithm", "AdamW, fused; others are not carried over"),
        loss_type=("dapo", "loss.normalization, loss.surrogate", "no `sapo`, `luspo`, `vespo`"),
        importance_sampling_level=("token", "loss.level", "`sequence` is GSPO"),
        multi_objective_aggregation=("sum_then_normalize", "loss.aggregate", "no `normalize_then_sum`"),
        save_strategy=("steps", "train.checkpoint_every", "no `best`"),
        eval_strategy=("no", "evaluation.prompts", "no: 0; otherwise before, during and after training"),
        metric_for_best_model=(None, "train.keep_best", "with `load_best_model_at_end`; `eval_reward` is `reward`"),
        project=("huggingface", "train.project"),
        run_name=(None, "train.run_name"),
        output_dir=(None, "train.out", "the same command resumes there"),
        hub_model_id=(None, "train.push"),
        vllm_mode=("colocate", "vllm.servers", SERVER),
        vllm_server_base_url=(None, "vllm.servers", SERVER),
        vllm_server_host=("0.0.0.0", "vllm.servers", SERVER),
        vllm_importance_sampling_mode=("sequence_mask", "loss.correction, loss.correction_level"),
    ),
    **_mapped(
        object,
        scale_rewards=("group", "loss.scale", "`batch`: here the std of the advantages, in TRL of the rewards"),
        reward_weights=(None, "rewards.NAME.weight", "weighs objectives"),
        report_to=("none", "train.track", "W&B, Trackio, MLflow, Comet, TensorBoard"),
        chat_template_kwargs=(None, "data.chat_template_kwargs"),
        model_init_kwargs=(None, "model.dtype", "`dtype`; other arguments are not carried over"),
    ),
    **_without("float16 is not supported: model.dtype is bfloat16 or float32", fp16=False),
    **_without("nlgrpo trains on truncated completions, too", mask_truncated_completions=False),
    **_without(
        "the reference stays the initial model",
        sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512,
    ),
    **_without("all tokens are in the loss", top_entropy_quantile=1.0),
    **_without(
        "nlgrpo has no entropy bonus",
        entropy_coef=0.0, use_adaptive_entropy=False, entropy_coef_min=0.0, entropy_coef_max=1.0,
        entropy_coef_delta=0.005, entropy_target=0.2,
    ),
    **_without(
        "for a loss_type that nlgrpo does not have",
        sapo_temperature_neg=1.05, sapo_temperature_pos=1.0, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    ),
    **_without("nlgrpo has no such mask; loss.correction weighs such completions", off_policy_mask_threshold=None),
    **_without(
        "completions are sampled with temperature, top_k, top_p and min_p only",
        repetition_penalty=1.0, generation_kwargs=None, vllm_structured_outputs_regex=None,
    ),
    **_without("tools are called in environments (section environment)", max_tool_calling_iterations=None),
    **_without("nlgrpo has no mixtures of experts", router_aux_loss_coef=None),
    **_without("nlgrpo adds no noise to embeddings", neftune_noise_alpha=None),
    **_without("nlgrpo trains without the dropout of the model", disable_dropout=False),
    **_without("the head computes in model.dtype, and its log-probs are float32", cast_lm_head_to_fp32=False),
    **_without("nlgrpo's optimizers and schedules have the keys of [optim] only",
               optim_args=None, optim_target_modules=None, lr_scheduler_kwargs=None),
    **_without("train.seed seeds the order of the data, too", data_seed=None),
    **_without("TRL does not use it for this loss either", label_smoothing_factor=0.0),
    **_without("it changes the speed or the memory of TRL only",
               cache_implementation=None, tf32=None, bf16_full_eval=False, fp16_full_eval=False,
               activation_checkpointing_kwargs=None, gradient_checkpointing_kwargs=None, torch_compile_backend=None,
               torch_compile_mode=None, use_liger_kernel=False, liger_kernel_config=None, use_cache=False,
               torch_empty_cache_steps=None, pad_to_multiple_of="auto", use_transformers_continuous_batching=False,
               transformers_continuous_batching_config=None, use_transformers_paged=False, vllm_model_impl="vllm",
               vllm_max_model_length=None),
    **_without("TRL refuses it, too; train.micro_batch_tokens bounds the memory", auto_find_batch_size=False),
    **_without("nlgrpo waits for its servers by vllm.timeout, and they read the weights from files",
               vllm_server_timeout=240.0, vllm_group_port=51216),
    **_without("nlgrpo logs every step to metrics.jsonl, and completions to samples.jsonl",
               logging_strategy="steps", logging_steps=10, logging_first_step=False, log_on_each_node=True,
               logging_nan_inf_filter=True, include_num_input_tokens_seen="no", log_level="passive",
               log_level_replica="warning", disable_tqdm=None, log_completions=False, log_multimodal=True,
               num_completions_to_print=None, log_unique_prompts=False, log_completions_hub_repo=None,
               trackio_space_id=None, trackio_bucket_id=None, trackio_static_space_id=None, skip_memory_metrics=True),
    **_without("nlgrpo always evaluates before and after training; see the section evaluation",
               eval_delay=0, per_device_eval_batch_size=8, prediction_loss_only=False, eval_on_start=False,
               eval_do_concat_batches=True, eval_use_gather_object=False,
               eval_accumulation_steps=None, include_for_metrics=[], batch_eval_metrics=False),
    **_without("nlgrpo writes whole checkpoints", save_only_model=False, save_on_each_node=False,
               enable_jit_checkpoint=False),
    **_without("a run resumes by itself; --train.restart starts again",
               resume_from_checkpoint=None, ignore_data_skip=False, restore_callback_states_from_checkpoint=False),
    **_without("nlgrpo push has options for the Hub, and HF_TOKEN is an environment variable",
               hub_token=None, hub_private_repo=None, hub_strategy="every_save", hub_always_push=False,
               hub_revision=None),
    **_without("nlgrpo uses a GPU if there is one; CUDA_VISIBLE_DEVICES hides it", use_cpu=False),
    **_without("nlgrpo reads its data without a data loader, and keeps all columns for the rewards",
               dataloader_drop_last=False, dataloader_num_workers=0, dataloader_pin_memory=True,
               dataloader_persistent_workers=False, dataloader_prefetch_factor=None,
               dataloader_multiprocessing_context=None, dataloader_in_order=True, remove_unused_columns=False,
               label_names=None, train_sampling_strategy="random", length_column_name="length"),
    **_without("nlgrpo runs under torchrun with FSDP2; see the section parallel",
               accelerator_config=None, parallelism_config=None, ddp_find_unused_parameters=None,
               ddp_bucket_cap_mb=None, ddp_broadcast_buffers=None, ddp_static_graph=None, ddp_backend=None,
               ddp_timeout=1800, fsdp=None, fsdp_config=None, deepspeed=None, local_rank=-1,
               ds3_gather_for_generation=True, average_tokens_across_devices=True),
    **_without("nlgrpo runs no code of a model", trust_remote_code=False),
    **_without("the command decides what is run", do_train=False, do_eval=False, do_predict=False, debug=""),
}  # fmt: skip

# What RLOOConfig has besides, or with another default. It lacks the options of WITHOUT_RLOO.
RLOO: dict[str, Option] = {
    **_mapped(int, num_generations=(2, "rollout.samples")),
    **_mapped(float, beta=(0.05, "loss.beta", "in the reward: `loss.kl_in`")),
    **_mapped(bool, normalize_advantages=(False, "loss.scale", "true: `batch`")),
    **_without("clip in the reward function", reward_clip_range=None),
}
# Options whose default is a value and that also take None.
OPTIONAL = ("max_completion_length", "vllm_importance_sampling_clip_max")

WITHOUT_RLOO = (
    "cast_lm_head_to_fp32", "delta", "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min",
    "entropy_target", "importance_sampling_level", "log_completions_hub_repo", "loss_type",
    "max_tool_calling_iterations", "multi_objective_aggregation", "off_policy_mask_threshold", "sapo_temperature_neg",
    "sapo_temperature_pos", "scale_rewards", "top_entropy_quantile", "use_adaptive_entropy", "use_bias_correction_kl",
    "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)  # fmt: skip

# The script's arguments: ScriptArguments, GRPOScriptArguments, RLOOScriptArguments, DatasetMixtureConfig, ModelConfig.
QUANTIZED = "nlgrpo does not quantize"
SCRIPT: dict[str, Option] = {
    **_mapped(
        str,
        model_name_or_path=(None, "model.path"),
        dtype=("float32", "model.dtype", "master weights are float32"),
        dataset_name=(None, "data.source"),
        dataset_config=(None, "data.source", "`NAME:CONFIG`"),
        dataset_train_split=("train", "data.split"),
        dataset_test_split=("test", "data.evaluation_split", "with eval_strategy"),
        reward_model_name_or_path=(None, "rewards.NAME.function"),
    ),
    **_mapped(bool, dataset_streaming=(False, "data.streaming"), streaming=(False, "data.streaming")),
    **_mapped(
        object,
        reward_funcs=(None, "rewards.NAME.function"),
        datasets=([], "data.source", "one; several are a comment"),
        lora_target_modules=(None, "lora.target_modules", "None: PEFT's for the model"),
        lora_modules_to_save=(None, "lora.modules_to_save"),
    ),
    **_mapped(bool, use_peft=(False, "lora.rank"), use_rslora=(False, "lora.rslora")),
    **_mapped(int, lora_r=(16, "lora.rank")),
    **_mapped(float, lora_alpha=(32, "lora.alpha"), lora_dropout=(0.05, "lora.dropout")),
    **_without("data.evaluation names other prompts", test_split_size=None),
    **_without("nlgrpo has no DDP buffers", ignore_bias_buffers=False),
    **_without("download the revision, and give its directory", model_revision="main"),
    **_without("NLGRPO_ATTENTION chooses the attention kernel", attn_implementation=None),
    **_without("adapters are on linear layers", lora_target_parameters=None),
    **_without("a policy is a causal model", lora_task_type="CAUSAL_LM"),
    **_without("nlgrpo has LoRA and rsLoRA", use_dora=False),
    **_without(QUANTIZED, load_in_8bit=False, load_in_4bit=False, bnb_4bit_quant_type="nf4",
               use_bnb_nested_quant=False, bnb_4bit_quant_storage=None),
}  # fmt: skip

# Arguments of GRPOTrainer and RLOOTrainer, in their order; RLOOTrainer has all but the last three.
TRAINER: dict[str, Option] = {
    **_mapped(object, model=(None, "model.path"), reward_funcs=(None, "rewards.NAME.function")),
    **_mapped(object, args=(None, "all keys", "the GRPOConfig or RLOOConfig")),
    **_mapped(object, train_dataset=(None, "data.source, data.split", "a literal `load_dataset(..)`")),
    **_mapped(object, eval_dataset=(None, "data.evaluation, data.evaluation_split", "a literal `load_dataset(..)`")),
    **_without("the tokenizer of model.path is used", processing_class=None),
    **_without("the tokenizer of each reward model is used", reward_processing_classes=None),
    **_without("nlgrpo has no callbacks", callbacks=None),
    **_without("see the section optim", optimizers=(None, None)),
    **_without(QUANTIZED, quantization_config=None),
    **_mapped(object, peft_config=(None, "section lora", "a literal LoraConfig")),
    **_without("the policy calls tools in environments (section environment); data.tools only shows them", tools=None),
    **_without("see rollout.engine and the section environment", rollout_func=None),
    **_without("environments are those of verifiers (section environment)", environment_factory=None),
}

# Arguments whose parts are read as options of their own.
READ_APART = ("args", "train_dataset", "eval_dataset", "peft_config")

# PEFT's LoraConfig with its ancestors.
LORA: dict[str, Option] = {
    **_mapped(int, r=(8, "lora.rank")),
    **_mapped(float, lora_alpha=(8, "lora.alpha"), lora_dropout=(0.0, "lora.dropout")),
    **_mapped(bool, use_rslora=(False, "lora.rslora")),
    **_mapped(
        object,
        target_modules=(None, "lora.target_modules", "None: PEFT's for the model"),
        modules_to_save=(None, "lora.modules_to_save"),
    ),
    **_without("nlgrpo trains no biases with adapters", bias="none", lora_bias=False),
    **_without("adapters start as PEFT's default does: B is 0", loftq_config={},
               eva_config=None, corda_config=None, lora_ga_config=None, monteclora_config=None, kasa_config=None),
    "init_lora_weights": Option(True, "adapters start as PEFT's default does: B is 0"),
    **_without("all layers of target_modules have an adapter of lora.rank", exclude_modules=None,
               layers_to_transform=None, layers_pattern=None, rank_pattern={}, alpha_pattern={},
               layer_replication=None, target_parameters=None, trainable_token_indices=None),
    **_without("nlgrpo has LoRA and rsLoRA", use_dora=False, use_qalora=False, qalora_group_size=16,
               velora_config=None, use_bdlora=None, arrow_config=None, alora_invocation_tokens=None),
    **_without("it changes nothing here", fan_in_fan_out=False, megatron_config=None, megatron_core="megatron.core",
               runtime_config=None, ensure_weight_tying=False, task_type=None, peft_type=None, auto_mapping=None,
               peft_version=None, base_model_name_or_path=None, revision=None, inference_mode=False),
}  # fmt: skip

# Options of earlier versions, of other recipes, and of launchers.
OTHERS: dict[str, Option] = {
    **_mapped(float, warmup_ratio=(0.0, "optim.warmup_steps", "a share of all steps")),
    **_mapped(
        int,
        max_prompt_length=(None, "data.max_prompt_tokens", "longer prompts are dropped, not cut"),
        num_processes=(None, "rollout.prompts", "of `accelerate launch`"),
    ),
    **_mapped(
        str,
        torch_dtype=(None, "model.dtype", "the earlier name of `dtype`"),
        dataset_prompt_column=(None, "data.prompt_column"),
        system_prompt=(None, "data.system_prompt"),
        evaluation_strategy=(None, "evaluation.prompts", "the earlier name of `eval_strategy`"),
    ),
    **_without("a run resumes in its folder; --train.restart starts again", overwrite_output_dir=False),
    **_without("nlgrpo logs to its folder", logging_dir=None),
    **_without(
        "for accelerate; give the number of processes as --processes",
        config_file=None, accelerate_config=None, num_machines=None, machine_rank=None, main_process_ip=None,
        main_process_port=None, mixed_precision=None, multi_gpu=None, dynamo_backend=None, gpu_ids=None,
        use_deepspeed=None, use_fsdp=None,
    ),
}  # fmt: skip


def known(trainer: str) -> dict[str, Option]:
    """Return the options of a run by their names: of the trainer's configuration, its script and its arguments."""
    own = GRPO if trainer == "grpo" else {name: GRPO[name] for name in GRPO if name not in WITHOUT_RLOO} | RLOO
    trainers = {name: option for name, option in TRAINER.items() if name not in READ_APART}
    return {**OTHERS, **trainers, **SCRIPT, **own}


def defaults(options: Mapping[str, Option]) -> dict[str, Any]:
    return {name: option.default for name, option in options.items()}


def typed(name: str, value: Any, option: Option) -> Any:
    """Convert a value as argparse does in TRL: a text to the type of its option. Raises UserError if it cannot."""
    none = value is None or (isinstance(value, str) and value.lower() in ("none", "null") and option.kind is not str)
    if none and (option.default is None or name in OPTIONAL):
        return None
    try:
        if option.kind is bool:
            return _bool(value)
        if option.kind is int and (isinstance(value, bool) or (isinstance(value, float) and value != int(value))):
            raise ValueError
        if option.kind in (int, float):
            return option.kind(value)
    except (TypeError, ValueError, OverflowError):
        expected = {int: "a whole number", float: "a number", bool: "true or false"}[option.kind]
        raise UserError(f"{name} = {value!r}: TRL expects {expected}") from None
    if option.kind is str and not isinstance(value, str | bool | None):
        if not isinstance(value, int | float):
            raise UserError(f"{name} = {value!r}: TRL expects a text")
        return str(value)
    return value


def _bool(value: Any) -> bool:
    text = str(value).lower()
    if text in ("yes", "true", "t", "y", "1"):
        return True
    if text in ("no", "false", "f", "n", "0"):
        return False
    raise ValueError
