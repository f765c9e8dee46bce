"""lm-eval's view of a strategy: a model that scores and generates through a cache.

>>> from lm_eval import simple_evaluate                                     # doctest: +SKIP
>>> lm = KVLM("smollm2", strategy="h2o", budget=0.2, device="cpu")          # doctest: +SKIP
>>> simple_evaluate(lm, tasks=["piqa"])                                    # doctest: +SKIP

or `python -m kvlib lm_eval --model kvlib --model_args pretrained=smollm2,strategy=h2o,budget=0.2`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from kvlib.attachment import attach
from kvlib.bundled import BUNDLED, bundled_folder
from kvlib.caches import KVCache, find_strategy
from kvlib.policy import Policy
from kvlib.scoring import CHUNK, Pair, Scorer

BATCH = 32  # continuations at a time where lm-eval is asked to find out

Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("kvlib")
class KVLM(HFLM):  # type: ignore[misc]
    """lm-eval's Hugging Face model, its cache managed by a strategy.

    pretrained  "smollm2" (bundled), a folder or a hub id, or a loaded model
    strategy    a name, or "path.py:Class"
    budget      share of the tokens, or a number of them; for strategies that keep all: none
    mode        how continuations are fed, see `kvlib.policy`; generation reads a prompt like
                "decode" unless the mode is "streaming"
    truncation  cut what is longer than the model from the left, as lm-eval does, not refuse it
    arguments   further parameters of the strategy, such as recent=0.3, and of lm-eval's HFLM; the
                device is a GPU where there is one

    Raises ValueError, before a model is loaded, for an unknown strategy or a bad parameter.
    """

    def __init__(
        self,
        pretrained: Any = BUNDLED,
        strategy: str = "full",
        budget: float | str | None = None,
        mode: str = "decode",
        truncation: bool = False,
        **arguments: Any,
    ) -> None:
        known = inspect.signature(find_strategy(strategy)).parameters.keys() & arguments.keys()
        knobs = {name: arguments.pop(name) for name in sorted(known)}
        self.policy = Policy.at(strategy, budget, mode, **knobs)
        if pretrained == BUNDLED:
            pretrained = str(bundled_folder())
            arguments.setdefault("dtype", "float32")
        arguments.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        arguments.setdefault("softmax_dtype", "float64")  # see `plain`
        super().__init__(pretrained, truncation=truncation, **arguments)
        automatic = self.batch_size == "auto"
        self.scorer = Scorer(self.model, BATCH if automatic else int(self.batch_size))
        self.scorer.limit = min(self.max_length, self.scorer.limit or self.max_length)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval records with its results: the strategy too."""
        knobs = {name: str(value) for name, value in self.policy.knobs.items()}
        own = {"strategy": self.policy.strategy, "mode": self.policy.mode, "knobs": knobs}
        return {**super().get_model_info(), **own}

    def _loglikelihood_tokens(
        self,
        requests: list[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is it greedy?) of each request (texts, context ids, continuation ids).

        An answer is handed to lm-eval's cache as it is found. Raises ValueError for an empty
        continuation, and, without `truncation`, for more tokens than the model has positions.
        """
        pairs = [self._pair(context, continuation) for _, context, continuation in requests]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        bar = tqdm(total=len(pairs), disable=disable_tqdm, desc=f"scoring, {self.policy.strategy}")
        with bar:
            for n, score in self.scorer.scores(pairs, self.policy):
                answers[n] = (score.loglikelihood, score.is_greedy)
                texts = requests[n][0]
                if texts is not None:  # else a part of a text that lm-eval puts together
                    self.cache_hook.add_partial("loglikelihood", texts, answers[n])
                bar.update()
        return answers

    def pairs(self, requests: Sequence[tuple[str, str]]) -> list[Pair]:
        """Texts (context, continuation) as token ids, split as lm-eval splits them."""
        found = []
        for context, continuation in requests:
            if context:
                ids = self._encode_pair(context, continuation)
            else:
                ids = [self.prefix_token_id], self.tok_encode(continuation)
            found.append(self._pair(*ids))
        return found

    def plain(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """What lm-eval's own model, which knows no cache, answers.

        Its log-softmax over a vocabulary is off by 1e-5 a token in float32, which adds up in
        long answers; hence its option `softmax_dtype` is float64 here unless it is given.
        """
        requests = [(None, list(pair.context), list(pair.continuation)) for pair in pairs]
        answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, True)
        return answers

    def _pair(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        if self.truncation and continuation:
            room = self.max_length + 1 - len(continuation)
            context = context[-room:] if room > 0 else context[:0]
        return Pair(tuple(context), tuple(continuation))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What lm-eval's model does, but without `truncation` no prompt is cut: ValueError."""
        for n, request in enumerate([] if self.truncation else requests):
            prompt, options = request.args
            tokens = len(self.tok_encode(prompt))
            new = (options or {}).get("max_gen_toks") or self.max_gen_toks
            if tokens + new > self.max_length:
                raise ValueError(
                    f"prompt {n} has {tokens} tokens, and {new} are to follow; this model has "
                    f"{self.max_length} positions: give truncation=True to cut it from the left"
                )
        answers: list[str] = super().generate_until(requests, disable_tqdm)
        return answers

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation: Any
    ) -> Tensor:
        """Generate behind context [B, T], of which the strategy has seen all but the last token.

        A batch changes no row: where it would, by the chunks of mode "streaming" or by a row that
        has but one token, the rows are generated one by one.
        """
        mask = generation.pop("attention_mask", torch.ones_like(context))
        real = mask.sum(dim=1).tolist()
        if min(real) < max(real) and (self.policy.mode == "streaming" or min(real) == 1):
            pads = [context.shape[1] - n for n in real]
            rows = [
                self._model_generate(row[None, n:], max_length - n, stop, **generation)[0]
                for row, n in zip(context, pads, strict=True)
            ]
            padded = zip(context, pads, rows, strict=True)
            whole = [torch.cat([row[:n], new]) for row, n, new in padded]
            return pad_sequence(whole, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        cache = self.policy.cache(self.model)
        with attach(self.model), torch.inference_mode():
            if max(real) > 1:
                self._read(cache, context[:, :-1], mask[:, :-1])
            found: Tensor = super()._model_generate(
                context, max_length, stop, past_key_values=cache, attention_mask=mask, **generation
            )
        return found

    def _read(self, cache: KVCache, ids: Tensor, mask: Tensor) -> None:
        step = CHUNK if self.policy.mode == "streaming" else ids.shape[1]
        cache.begin(mask.sum(dim=1).tolist())
        for first in range(0, ids.shape[1], step):
            part, known = ids[:, first : first + step], mask[:, : first + step]
            self.model(part, attention_mask=known, past_key_values=cache, logits_to_keep=1)
