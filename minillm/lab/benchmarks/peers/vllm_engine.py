"""vLLM on a CPU, through `LLM` and single steps of its `LLMEngine`."""

import os
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .protocol import Timeline

GIB = 2**30
# Instruction sets in ascending order, and the functions of torch.cpu that report them.
REPORTS = MappingProxyType(
    {
        "avx2": (),
        "avx512": ("_is_avx512_supported",),
        "avx512_bf16": ("_is_avx512_bf16_supported",),
        "amx": ("_is_amx_tile_supported", "_is_amx_fp16_supported"),
    }
)


class Worker:
    """Runs vLLM in a comparison."""

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Set the environment variables that vLLM reads at import, and load the model."""
        kv_gib = -(-options["kv_cache_bytes"] // GIB)
        # Run everything in this process. By default the engine and the worker have a process each,
        # which compete for the processors of a small machine.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores(options["threads"]))),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(Path(options["cache"]) / f"vllm{options.get('isa') or ''}"),
        }
        limit_detection(options.get("isa"))
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(
            model=options["model"],
            dtype=options["dtype"],
            kv_cache_dtype="auto",
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )
        config = self._llm.llm_engine.vllm_config
        return {
            "version": vllm.__version__,
            "weights": str(config.model_config.dtype).removeprefix("torch."),
            "kv_cache": f"auto: {config.model_config.dtype}".replace("torch.", ""),
            "block_size": config.cache_config.block_size,
            "preload": os.path.basename(os.environ.get("LD_PRELOAD", "")),
            "multiprocessing": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "1",
        }

    def _params(self, new_tokens: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True
        )

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Timeline:
        """Run and time single engine steps."""
        engine, params = self._llm.llm_engine, self._params(new_tokens)
        timeline = Timeline([new_tokens] * len(prompts))
        for index, ids in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": ids}, params)
        seen = [0] * len(prompts)
        while not timeline.done:
            new = []
            for output in engine.step():
                index = int(output.request_id.partition("-")[0])
                count = len(output.outputs[0].token_ids)
                new.append((index, count - seen[index]))
                seen[index] = count
            timeline.step(new)
        return timeline

    def offline(self, prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        """Time `LLM.generate` with all requests."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            [self._params(count) for count in new_tokens],
            use_tqdm=False,
        )
        return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


def limit_detection(isa: str | None) -> None:
    """Have torch.cpu report no instruction sets above `isa`, because vLLM chooses its library by
    these reports."""
    if isa is not None:
        import torch

        order = list(REPORTS)
        for higher in order[order.index(isa) + 1 :]:
            for name in REPORTS[higher]:
                setattr(torch.cpu, name, lambda: False)


def cores(threads: int) -> list[int]:
    """The first processors that this process may use."""
    return sorted(os.sched_getaffinity(0))[:threads]


def preload() -> None:
    """Restart the process with Intel's OpenMP preloaded, as vLLM's documentation recommends."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and "libiomp5" not in os.environ.get("LD_PRELOAD", ""):
        before = os.environ.get("LD_PRELOAD")
        os.environ["LD_PRELOAD"] = ":".join(filter(None, (str(library), before)))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


preload()
