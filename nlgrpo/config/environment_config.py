"""Configuration of an environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from nlgrpo.config.data_config import Table


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
    max_tokens: int | None = None
    """Maximum number of tokens of a whole conversation. None: the context of the model."""
    retries: int = 0
    """How often a conversation is repeated whose environment fails for a reason that `verifiers` calls temporary."""
    timeout: float = 600.0
    """Seconds after which an environment that does nothing counts as hung, and the run stops."""
