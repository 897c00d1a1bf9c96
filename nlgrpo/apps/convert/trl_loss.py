"""Loss and optimizer of a TRL run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nlgrpo.apps.convert.trl_output import Converted
from nlgrpo.errors import UserError

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf")
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def optimizer(given: Mapping[str, Any], out: Converted) -> None:
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


def grpo(given: Mapping[str, Any], out: Converted) -> None:
    _clip(given, out)
    out.set("loss.beta", given["beta"])
    out.set("loss.scale", _scale(given["scale_rewards"], out))
    out.set("loss.level", given["importance_sampling_level"])
    out.set("loss.kl_importance", given["use_bias_correction_kl"])
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


def rloo(given: Mapping[str, Any], out: Converted) -> None:
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
