"""A reward model on a server: the reward ``reward_server(...)``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nlgrpo.data.conversations import answered, is_continued, text_of
from nlgrpo.errors import UserError
from nlgrpo.rewards.classifiers import TextEncoder
from nlgrpo.rewards.http_endpoint import Endpoint, check_counts
from nlgrpo.rewards.outputs import values_of

PROTOCOLS = ("vllm", "openrlhf")


class RewardServer:
    """Output of a reward model that a server runs, for prompt + completion.

    ``protocol``: "vllm" for ``vllm serve MODEL --runner pooling`` (the route /classify), or "openrlhf" for a server of
    OpenRLHF's ``--reward.remote_url``: it gets ``{"query": [..], "prompts": [..], "labels": [..]}``, prompt +
    completion, prompt, and the column ``labels`` of the data, and returns ``{"rewards": [..]}``. ``url``: without the
    route for vLLM, the whole address for OpenRLHF.

    vLLM's answer is that of `classifier`: a single output is returned unchanged (``probability=True``: its sigmoid), of
    several outputs the number ``label``. ``tokenizer``: folder or name of the reward model's tokenizer; texts are then
    tokenized here as `classifier` does, with ``append_eos``, ``include_prompt`` and ``max_length``. Without one the
    server tokenizes texts, and applies its chat template to conversations.

    Requests of ``batch_size`` completions run concurrently, at most ``concurrency`` at a time, and are repeated like
    those of `judge`. Abstains (None) for a text without tokens.

    Raises UserError for invalid arguments, and if the package openai is not installed.
    """

    def __init__(
        self,
        url: str,
        protocol: Literal["vllm", "openrlhf"] = "vllm",
        model: str = "",
        tokenizer: str = "",
        label: int = 0,
        probability: bool = False,
        include_prompt: bool = True,
        append_eos: bool = True,
        max_length: int | None = None,
        labels: str = "",
        batch_size: int = 32,
        concurrency: int = 8,
        retries: int = 8,
        timeout: float = 60.0,
        key: str = "REWARD_SERVER_API_KEY",
    ) -> None:
        if protocol not in PROTOCOLS:
            raise UserError(f"protocol must be {' or '.join(map(repr, PROTOCOLS))}, got {protocol!r}")
        if not url.startswith(("http://", "https://")):
            raise UserError(f"url must begin with http:// or https://, got {url!r}")
        if protocol == "openrlhf" and (tokenizer or probability or label):
            raise UserError("tokenizer, probability and label are for the protocol 'vllm'")
        check_counts(batch_size=(batch_size, 1), label=(label, 0))
        base, route = (url.rstrip("/"), "/classify") if protocol == "vllm" else _split(url)
        self.endpoint = Endpoint("reward_server", base, key, concurrency=concurrency, retries=retries, timeout=timeout)
        self.route = route
        self.protocol = protocol
        self.model = model
        self.label = label
        self.probability = probability
        self.include_prompt = include_prompt
        self.batch_size = batch_size
        self.encoder = None
        if tokenizer:
            from transformers import AutoTokenizer

            try:
                loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False, truncation_side="left")
            except (OSError, ValueError) as error:
                raise UserError(f"cannot load the tokenizer {tokenizer!r}: {error}") from error
            self.encoder = TextEncoder(loaded, max_length, include_prompt=include_prompt, append_eos=append_eos)
        self.data_columns = (labels,) if labels else ()

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        pairs = list(zip(prompts, completions, strict=True))
        inputs = [self._input(prompt, completion) for prompt, completion in pairs]
        scored = [i for i, text in enumerate(inputs) if text]
        # vLLM takes one conversation per request.
        size = 1 if self.protocol == "vllm" and any(isinstance(inputs[i], dict) for i in scored) else self.batch_size
        parts = [scored[i : i + size] for i in range(0, len(scored), size)]
        room = asyncio.Semaphore(self.endpoint.concurrency)

        async def send(part: list[int]) -> list[float | None]:
            body = self._body([inputs[i] for i in part], [pairs[i] for i in part], columns, part)
            async with room:
                answer = await self.endpoint.client().post(self.route, body=body, cast_to=object)
            return self._scores(answer, len(part))

        tasks = [asyncio.create_task(send(part)) for part in parts]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # those that still run after an error
                task.cancel()
        found: list[float | None] = [None] * len(pairs)
        for part, scores in zip(parts, answers, strict=True):
            for i, score in zip(part, scores, strict=True):
                found[i] = score
        return found

    def _input(self, prompt: Any, completion: Any) -> str | list[int] | dict[str, Any]:
        """Return what is scored: token ids, a text, or the messages of a conversation."""
        if self.encoder is not None:
            return self.encoder.ids(prompt, completion)
        if not self.include_prompt:
            return text_of(completion)
        if isinstance(prompt, str):
            return prompt + text_of(completion)
        if self.protocol == "vllm":
            return {"messages": answered(prompt, completion), "add_generation_prompt": False}
        return ("" if is_continued(prompt) else "\n").join((text_of(prompt), text_of(completion)))

    def _body(
        self, inputs: list[Any], pairs: list[tuple[Any, Any]], columns: Mapping[str, Any], part: list[int]
    ) -> dict[str, Any]:
        if self.protocol == "openrlhf":
            labels = [columns[self.data_columns[0]][i] if self.data_columns else None for i in part]
            return {"query": inputs, "prompts": [text_of(prompt) for prompt, _ in pairs], "labels": labels}
        options: dict[str, Any] = {"use_activation": self.probability} | ({"model": self.model} if self.model else {})
        return options | (inputs[0] if isinstance(inputs[0], dict) else {"input": inputs})

    def _scores(self, answer: Any, count: int) -> list[float | None]:
        """Return the scores in an answer, None where it has none. Raises UserError unless it has ``count`` of them."""
        try:
            if self.protocol == "openrlhf":
                scores = list(answer["rewards"])
            else:
                rows = sorted(answer["data"], key=lambda row: row["index"])
                scores = [row["probs"][self.label] for row in rows]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"the reward server answered {str(answer)[:200]}, without scores: {error!r}") from error
        if faults := values_of(scores, count, 1.0).faults:
            raise UserError(
                f"the reward server answered {str(scores)[:200]} for {count} completions; expected one finite number "
                f"or null for each (it {faults[0].what})"
            )
        return scores


def _split(url: str) -> tuple[str, str]:
    """Split the last part off a URL: the client of openai adds a slash to what comes before."""
    scheme, _, rest = url.partition("://")
    place, _, route = rest.rpartition("/")
    return (f"{scheme}://{place}", f"/{route}") if place else (url, "/")
