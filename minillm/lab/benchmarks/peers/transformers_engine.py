"""transformers' `generate`: left-padded batches, a contiguous KV cache."""

from typing import Any

from .protocol import Timeline

BATCH = 16  # offline: rows of a static batch, which runs until the longest is complete


class Worker:
    """Runs transformers in a comparison."""

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model."""
        import torch
        import transformers

        self._torch, self._transformers = torch, transformers
        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(options["threads"])
        dtype = getattr(torch, options["dtype"])
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(options["model"], dtype=dtype).eval()
        return {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "weights": options["dtype"],
            "kv_cache": options["dtype"],
        }

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Timeline:
        """Time the steps of `generate` through a stopping criterion, which is called after each."""
        timeline = Timeline([new_tokens] * len(prompts))
        self._generate(prompts, new_tokens, timeline)
        return timeline

    def _generate(self, prompts: list[list[int]], new_tokens: int, timeline: Any = None) -> None:
        torch, width = self._torch, max(map(len, prompts))

        class Watch(self._transformers.StoppingCriteria):  # type: ignore[name-defined,misc]
            def __call__(self, input_ids: Any, scores: Any, **others: Any) -> Any:
                timeline.step((index, 1) for index in range(len(prompts)))
                return torch.zeros(len(prompts), dtype=torch.bool)

        watch = [] if timeline is None else [Watch()]
        self._model.generate(
            torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
            attention_mask=torch.tensor(
                [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
            ),
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=self._transformers.StoppingCriteriaList(watch),
        )

    def offline(self, prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        """Time padded batches of requests of similar length; tokens beyond a request's output
        length are not counted."""
        order = sorted(range(len(prompts)), key=lambda index: new_tokens[index])
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            self._generate(
                [prompts[index] for index in batch], max(new_tokens[index] for index in batch)
            )
        return {"tokens": sum(new_tokens)}
