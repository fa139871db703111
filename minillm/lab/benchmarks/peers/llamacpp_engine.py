"""llama.cpp through its C API (llama-cpp-python), with the GGUF file that minillm wrote.

The prompts of a batch are one call of `llama_decode`, and so is each step. llama.cpp quantises the
file itself, so that its output matrix has the type that it chooses. Its KV cache is float16.
"""

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .llamacpp_files import gguf_file
from .protocol import Timeline

# With minima like minillm's int4; Q4_0 has none, and loses more on real weights.
TYPES = MappingProxyType({"int8": "Q8_0", "int4": "Q4_1"})
UBATCH = 512  # tokens that it computes at once, its default
TRIED = 64  # tokens of a prompt that is tried first


class Worker:
    """Runs llama.cpp in a comparison."""

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model; quantises the GGUF file first if that was not done yet."""
        start = time.perf_counter()
        kind = TYPES.get(options.get("quantization") or "")
        path, made = gguf_file(Path(options["gguf"]), kind)
        made_seconds = time.perf_counter() - start if made else 0.0
        import llama_cpp

        self._llama = llama_cpp
        self._limit, self._most = options["max_num_seqs"], options["max_num_batched_tokens"]
        repacked = self._survives(path, options)
        start = time.perf_counter()
        self._load(path, options, repacked)
        weights = f"{kind} in GGUF" if kind else "16 bits in GGUF"
        if not repacked:
            weights += ", in plain buffers, because its own for this processor end the process"
        return {
            "version": llama_cpp.__version__,
            "weights": weights,
            "kv_cache": "float16",
            "seconds": time.perf_counter() - start,
            "export_seconds": made_seconds,
        }

    def _survives(self, path: Path, options: dict[str, Any]) -> bool:
        """Whether a child process ends well that runs a short prompt with repacked weights. With
        AMX, worker threads of 0.3.36 may meet an illegal instruction."""
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1] == 0
        code = 1
        try:
            self._load(path, options, True)
            self._decode([(0, [0] * min(TRIED, self._most), 0)], {0: 0})
            code = 0
        finally:
            os._exit(code)

    def _load(self, path: Path, options: dict[str, Any], repacked: bool) -> None:
        """Open the file, with weights repacked for this processor or as they are stored."""
        llama_cpp = self._llama
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        wanted = llama_cpp.llama_model_default_params()
        wanted.use_extra_bufts = repacked
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), wanted)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = self._limit * (-(-options["max_model_len"] // 256) * 256)
        settings.n_batch, settings.n_ubatch = self._most, min(UBATCH, self._most)
        settings.n_seq_max = self._limit
        settings.n_threads = settings.n_threads_batch = options["threads"]
        self._context = model and llama_cpp.llama_init_from_model(model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not load {path}.")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(self._most, 0, 1)

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Timeline:
        """Run and time single calls of `llama_decode`."""
        timeline = Timeline([new_tokens] * len(prompts))
        self._run(prompts, [new_tokens] * len(prompts), timeline)
        return timeline

    def offline(self, prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        """Time all requests: whenever a sequence ends, the next prompt takes its place."""
        self._run(prompts, new_tokens, None)
        return {"tokens": sum(new_tokens)}

    def _run(
        self, prompts: Sequence[list[int]], lengths: Sequence[int], timeline: Timeline | None
    ) -> None:
        """Generate greedily until all requests are complete."""
        free, waiting = list(range(self._limit)), list(range(len(prompts)))[::-1]
        last: dict[int, int] = {}  # request -> its newest token
        place: dict[int, int] = {}  # request -> its sequence
        done = [0] * len(prompts)
        while waiting or place:
            rows = [(index, [last[index]], len(prompts[index]) + done[index] - 1) for index in last]
            used = len(rows)
            while free and waiting and used + len(prompts[waiting[-1]]) <= self._most:
                index = waiting.pop()
                place[index] = free.pop()
                rows.append((index, prompts[index], 0))
                used += len(prompts[index])
            last = self._decode(rows, place)
            for index in last:
                done[index] += 1
            if timeline is not None:
                timeline.step((index, 1) for index in last)
            for index in [each for each in last if done[each] == lengths[each]]:
                self._forget(place[index])
                free.append(place.pop(index))
                del last[index]

    def _forget(self, sequence: int) -> None:
        memory = self._llama.llama_get_memory(self._context)
        self._llama.llama_memory_seq_rm(memory, sequence, -1, -1)

    def _decode(
        self, rows: Sequence[tuple[int, list[int], int]], place: dict[int, int]
    ) -> dict[int, int]:
        """One call: the tokens of each request from a position on; returns the next tokens."""
        import numpy

        batch, count, ends = self._batch, 0, {}
        for index, ids, start in rows:
            for offset, token in enumerate(ids):
                batch.token[count], batch.pos[count] = token, start + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, place[index]
                batch.logits[count] = offset == len(ids) - 1
                count += 1
            ends[index] = count - 1
        batch.n_tokens = count
        if code := self._llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}.")
        found = {}
        for index, end in ends.items():
            logits = self._llama.llama_get_logits_ith(self._context, end)
            found[index] = int(numpy.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        return found
