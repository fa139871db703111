"""OpenVINO GenAI through `ContinuousBatchingPipeline`, with a model exported by optimum-intel.

The model is exported once, with 16-bit weights or with those of --quantization. The inference
precision and the KV cache's dtype (8 bits by default) are set to the requested dtype, or to float32
where the plugin has no bf16; with --kv-cache-dtype int8 the cache keeps its own 8 bits.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .protocol import Timeline

PRECISIONS = MappingProxyType({"bfloat16": "bf16", "float32": "f32"})
# The weight format of the exported file; with --quantization that of the matrices, symmetric in
# groups, with embedding and output matrix in 8 bits.
WEIGHTS = MappingProxyType(
    {"bfloat16": "fp16", "float32": "fp32", "int8": "int8", "int4": "int4 --sym --group-size 64 "
     "--ratio 1.0 --backup-precision int8_asym"}
)  # fmt: skip


class Worker:
    """Runs OpenVINO GenAI in a comparison."""

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model; exports it first if there is no export yet."""
        start = time.perf_counter()
        weights = WEIGHTS[options.get("quantization") or options["dtype"]]
        folder, exported = export(Path(options["model"]), weights, Path(options["cache"]))
        export_seconds = time.perf_counter() - start if exported else 0.0
        import openvino
        import openvino_genai as genai

        self._genai, self._tensor = genai, openvino.Tensor
        able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = PRECISIONS[options["dtype"]]
        if (
            precision == "bf16" and "BF16" not in able
        ):  # emulated bf16 takes many times as long as float32
            precision = "f32"
        kv_cache = "u8" if options.get("kv_cache_dtype") == "int8" else precision
        start = time.perf_counter()
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = -(-options["kv_cache_bytes"] // 2**30)
        scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
        scheduler.max_num_seqs = options["max_num_seqs"]
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": kv_cache,  # on AVX2 it refuses bf16 here
            "INFERENCE_NUM_THREADS": options["threads"],
            "ENABLE_HYPER_THREADING": True,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        return {
            "version": genai.__version__,
            "weights": f"{weights} on disk, computed in {precision}",
            "kv_cache": kv_cache,
            "seconds": time.perf_counter() - start,
            "export_seconds": export_seconds,
        }

    def _config(self, new_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        return config

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Timeline:
        """Run and time single steps of the pipeline."""
        config = self._config(new_tokens)
        timeline = Timeline([new_tokens] * len(prompts))
        handles = [
            self._pipeline.add_request(index, self._as_tensor(ids), config)
            for index, ids in enumerate(prompts)
        ]
        while not timeline.done:
            self._pipeline.step()
            timeline.step(
                (index, sum(len(output.generated_ids) for output in handle.read().values()))
                for index, handle in enumerate(handles)
                if handle.can_read()
            )
        return timeline

    def offline(self, prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        """Time `generate` with all requests."""
        outputs = self._pipeline.generate(
            [self._as_tensor(ids) for ids in prompts], [self._config(count) for count in new_tokens]
        )
        return {"tokens": sum(len(output.m_generation_ids[0]) for output in outputs)}

    def _as_tensor(self, ids: list[int]) -> Any:
        import numpy

        return self._tensor(numpy.array([ids], dtype=numpy.int64))


def export(model: Path, weights: str, cache: Path) -> tuple[Path, bool]:
    """The folder of the exported model, and whether it was exported by this call."""
    config = model / "config.json"
    name = f"{model.resolve().name}-{config.stat().st_mtime_ns:x}"
    folder = cache / "openvino" / f"{name}-{weights.split()[0]}"
    if folder.exists():
        return folder, False
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    command += ["--model", str(model), "--task", "text-generation-with-past"]
    command += ["--weight-format", *weights.split(), str(part)]
    try:
        subprocess.run(command, check=True, stdout=sys.stderr)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder, True
