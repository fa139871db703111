"""Speculative decoding of transformers, for comparison: plain `generate`, prompt lookup decoding
and assisted generation at batch 1, greedy, with the same checkpoint and prompts."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from minillm.errors import MinillmError
from minillm.models.checkpoint import find_folder

NUM_DRAFTS = 4


class Assisted:
    """The target and draft models in transformers, loaded once."""

    def __init__(self, model: str, draft: str | None, dtype: str):
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise MinillmError(
                "--vs transformers needs transformers, which is not installed; 'make check' "
                "installs the development tools."
            ) from error
        logging.set_verbosity_error()
        kind = getattr(torch, dtype)

        def load(name: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(str(find_folder(name)), dtype=kind).eval()

        self.model = load(model)
        self.variants: dict[str, Mapping[str, Any]] = {
            "plain": {},
            f"prompt lookup {NUM_DRAFTS}": {"prompt_lookup_num_tokens": NUM_DRAFTS},
        }
        if draft is not None:
            assistant = load(draft)
            assistant.generation_config.num_assistant_tokens = NUM_DRAFTS
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self.variants[f"assisted by {draft}"] = {"assistant_model": assistant}

    @torch.inference_mode()
    def seconds(self, variant: Mapping[str, Any], prompt: Sequence[int], new_tokens: int) -> float:
        """Decode time of all new tokens except the first: the time of a run with one new token,
        which is the prefill, is subtracted."""
        ids = torch.tensor([list(prompt)])

        def run(count: int, **options: Any) -> float:
            start = perf_counter()
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )
            seconds = perf_counter() - start
            if out.shape[1] - ids.shape[1] != count:
                raise MinillmError(f"transformers gave {out.shape[1]} tokens instead of {count}.")
            return seconds

        return run(new_tokens, **variant) - run(1)
