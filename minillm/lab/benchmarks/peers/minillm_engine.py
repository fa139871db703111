"""minillm, through `LLM` and single engine steps."""

import time
from typing import Any

from .protocol import Timeline


class Worker:
    """Runs minillm in a comparison."""

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model, with the same number of threads as the other engines."""
        import torch

        from minillm import LLM, SamplingParams, __version__
        from minillm.ops.cpu import describe

        torch.set_num_threads(options["threads"])
        self._params = SamplingParams
        on_gpu = options["device"].startswith("cuda")
        self._llm = LLM(
            options["model"],
            dtype=options["dtype"],
            quantization=options.get("quantization"),
            kv_cache_dtype=options.get("kv_cache_dtype", "auto"),
            device=options["device"],
            load_format="dummy" if options["model"].startswith("preset:") else "auto",
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            kv_cache_memory_bytes=None if on_gpu else options["kv_cache_bytes"],
            enable_prefix_caching=False,
        )
        engine = self._llm.engine
        return {
            "version": __version__,
            "torch": torch.__version__,
            "weights": options.get("weights") or engine.dtype,
            "kv_cache": self._llm.trace.settings.kv_dtype or engine.dtype,
            "block_size": engine.scheduler.blocks.block_size,
            "path": "a GPU" if on_gpu else describe(getattr(torch, engine.dtype)),
        }

    def _greedy(self, new_tokens: int) -> Any:
        return self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Timeline:
        """Run and time single engine steps."""
        engine, params = self._llm.engine, self._greedy(new_tokens)
        timeline = Timeline([new_tokens] * len(prompts))
        for index, ids in enumerate(prompts):
            engine.add(engine.make_request(str(index), None, ids, params))
        seen = [0] * len(prompts)
        while not timeline.done:
            new = []
            for live in engine.step():
                index, (completion,) = int(live.request.request_id), live.completions
                if completion.finish_reason not in (None, "length"):
                    raise RuntimeError(f"a sequence ended by {completion.finish_reason!r}")
                new.append((index, len(completion.token_ids) - seen[index]))
                seen[index] = len(completion.token_ids)
            timeline.step(new)
        return timeline

    def offline(self, prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        """Time `LLM.generate` with all requests, and the fraction outside the model."""
        self._llm.trace.clear()
        start = time.perf_counter()
        outputs = self._llm.generate(
            prompts, [self._greedy(count) for count in new_tokens], use_tqdm=False
        )
        seconds = time.perf_counter() - start
        model = sum(record.computed - record.planned for record in self._llm.trace)
        return {
            "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            "outside_model": 1 - model / seconds,
        }
