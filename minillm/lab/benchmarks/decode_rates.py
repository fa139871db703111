"""Measures the five rates of the step-time model of `lab/decode_law.py`, independently of the steps
that the model predicts.

* Products: matrices with the model's inner sizes and its total size (at most 256 MiB), with random
  weights, at one row and at the largest batch.
* Pages: decode attention alone, batch 16, context 1,024, in shuffled blocks.
* Overhead: decode steps of a twin, an engine whose model has as many layers, heads and vocabulary
  entries but almost no weights, at context 32, batch 1 and the largest batch.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from minillm.api.arguments import EngineArgs
from minillm.cache.spec import cache_spec
from minillm.config import ModelConfig, RopeConfig
from minillm.engine.setup import CPU_BLOCK_SIZE
from minillm.errors import UnsupportedFeatureError
from minillm.lab.benchmarks.calm import Calm, calmest, calmly
from minillm.lab.benchmarks.checkpoint import ARCHITECTURES, huggingface_config, write_tokenizer
from minillm.lab.benchmarks.decode_steps import DecodeSteps, fill_with_numbers
from minillm.lab.decode_law import DecodeRates
from minillm.lab.roofline import step_cost
from minillm.layers.kv_cache import KVCache
from minillm.layers.linear import Linear
from minillm.layers.linear_methods import PackedLinearMethod, frozen, packed
from minillm.models.loader import DTYPES
from minillm.models.packing import into_panels
from minillm.ops import cpu
from minillm.ops.batch import Batch
from minillm.plan.parameters import all_products

MOST_BYTES = 2**28  # weights of a probe: larger than any cache, read in milliseconds
PAGE_BYTES = 2**28
SEQUENCES, POSITIONS = 16, 1024  # batch and context of the attention probe
TWIN_SIZE = 32
TWIN_CONTEXT = 32
CALLS = 5  # calls of each probe in a round
TWIN_STEPS = 8


def check_explainable(name: str, config: ModelConfig) -> None:
    """Reject models for which there are no probes: only dense decoders are supported."""
    if config.mla is not None or config.moe is not None or config.family not in ARCHITECTURES:
        raise UnsupportedFeatureError(
            f"'minillm bench scale' explains dense decoders of the families "
            f"{', '.join(ARCHITECTURES)} only; {name} is not one of them."
        )


class DecodeProbes:
    """All probes, run once per round; the rates are medians over the rounds."""

    def __init__(self, config: ModelConfig, dtype: str, batch: int, tokenizer: str | None = None):
        self.config, self.dtype, self.batch = config, dtype, batch
        self._products = Products(config, DTYPES[dtype], batch)
        self._pages = Pages(config, DTYPES[dtype])
        self._twin = twin_of(config, dtype, batch, tokenizer)
        self.rounds: list[Calm[dict[str, list[float]]]] = []

    def run(self) -> None:
        """Run one round."""
        self.rounds.append(calmly(self._round))

    def _round(self) -> dict[str, list[float]]:
        """Several timings of every probe, in seconds."""
        found: dict[str, list[float]] = {"stream": [], "matrix": []}
        for _ in range(CALLS):
            found["stream"].append(self._products.seconds(1))
            found["matrix"].append(self._products.seconds(self.batch))
        found["pages"] = [self._pages.seconds() for _ in range(CALLS)]
        for name, rows in (("one", 1), ("all", self.batch)):
            steps = self._twin.run(rows, TWIN_CONTEXT, TWIN_STEPS)
            found[name] = [step.seconds for step in steps]
        return found

    def rates(self) -> DecodeRates:
        """The rates, from medians. The predicted time of the twin's weights is not overhead."""
        calm = [each.value for each in calmest(self.rounds)]
        middle = {
            name: median(seconds for found in calm for seconds in found[name]) for name in calm[0]
        }
        stream = self._products.num_bytes / middle["stream"]
        matrix = self._products.flops(self.batch) / middle["matrix"]
        pages = self._pages.num_bytes / middle["pages"]
        one = middle["one"] - self._twin_seconds(1, stream, matrix, pages)
        every = middle["all"] - self._twin_seconds(self.batch, stream, matrix, pages)
        row = max(every - one, 0.0) / max(self.batch - 1, 1)
        return DecodeRates(stream, matrix, pages, max(one - row, 0.0), row)

    def _twin_seconds(self, rows: int, stream: float, matrix: float, pages: float) -> float:
        lengths = [TWIN_CONTEXT - TWIN_STEPS // 2 - 2] * rows
        cost = step_cost(twin_config(self.config), [1] * rows, lengths, dtype=self.dtype)
        products = max(cost.weight_bytes / stream, cost.linear_flops / matrix)
        return products + cost.kv_read_bytes / pages

    def close(self) -> None:
        """Free the memory."""
        self._twin.close()


# ---- products ---------------------------------------------------------------------------------


class Products:
    """One long matrix for each inner size of a model, in the model's proportions. There are few
    calls, so the overhead of a call is negligible."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, batch: int):
        shapes = matrix_shapes(config, MOST_BYTES // dtype.itemsize)
        self._linears = [Linear("", inputs, {"": outputs}) for inputs, outputs in shapes]
        generator = torch.Generator().manual_seed(0)
        for each in self._linears:
            each.create(dtype, "cpu")
            each.values().normal_(generator=generator)
        self._inputs = {
            (rows, each): torch.ones(rows, each.in_features, dtype=dtype)
            for rows in {1, batch}
            for each in self._linears
        }
        self._parameters = sum(inputs * outputs for inputs, outputs in shapes)
        self.num_bytes = sum(each.num_bytes for each in self._linears)
        pack(self._linears)

    def flops(self, rows: int) -> int:
        """Operations of all products with `rows` rows."""
        return 2 * rows * self._parameters

    @torch.inference_mode()
    def seconds(self, rows: int) -> float:
        """Seconds of all products, once."""
        return clocked(lambda: [each(self._inputs[rows, each]) for each in self._linears])


def pack(linears: list[Linear]) -> None:
    """Pack the weights as `pack_weights` packs those of a model."""
    panels = [each for each in linears if cpu.takes_panels(each.values())]
    if panels:
        into_panels([*panels])
    for each in linears:
        if each not in panels and (weight := packed(each.values())) is not None:
            each.method, each.weight = PackedLinearMethod(), frozen(weight)


def matrix_shapes(config: ModelConfig, most: int) -> list[tuple[int, int]]:
    """(inner size, outputs) of one matrix per inner size: the model's matrices stacked, scaled down
    in proportion if they have more than `most` parameters."""
    outputs: Counter[int] = Counter({config.hidden_size: config.vocab_size})
    for product in all_products(config):
        outputs[product.inputs] += product.outputs
    share = min(1.0, most / sum(inputs * count for inputs, count in outputs.items()))
    return [(inputs, max(32, int(count * share))) for inputs, count in sorted(outputs.items())]


# ---- pages ------------------------------------------------------------------------------------


class Pages:
    """Decode attention of all layers, over its own KV cache."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        spec = cache_spec(config)
        columns = POSITIONS // CPU_BLOCK_SIZE
        per_layer = SEQUENCES * POSITIONS * spec.block_bytes(1, dtype.itemsize)
        self._layers = max(1, PAGE_BYTES // per_layer)
        num_blocks = SEQUENCES * columns
        self._kv = KVCache(spec, self._layers, num_blocks, CPU_BLOCK_SIZE, dtype)
        fill_with_numbers(self._kv.key)
        fill_with_numbers(self._kv.value)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        query = torch.randn(SEQUENCES, config.num_heads, spec.key_dim)
        self._query, self._scale = query.to(dtype), config.head_dim**-0.5
        self._batch = decode_batch(order.view(SEQUENCES, columns))
        self.num_bytes = self._layers * per_layer

    @torch.inference_mode()
    def seconds(self) -> float:
        """Seconds of all layers, once."""
        attend, query, batch, scale = self._kv.attend, self._query, self._batch, self._scale
        return clocked(
            lambda: [attend(layer, query, batch, scale, None) for layer in range(self._layers)]
        )


def decode_batch(tables: torch.Tensor) -> Batch:
    """A decode batch: the last token of each sequence whose full block table is given."""
    count = len(tables)
    last = torch.full((count,), tables.shape[1] * CPU_BLOCK_SIZE - 1)
    return Batch(
        input_ids=torch.zeros(count, dtype=torch.int64),
        positions=last,
        slot_mapping=tables[:, -1] * CPU_BLOCK_SIZE + CPU_BLOCK_SIZE - 1,
        query_start=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=(last + 1).to(torch.int32),
        block_tables=tables,
        logits_indices=torch.arange(count),
        max_query_len=1,
    )


# ---- overhead ---------------------------------------------------------------------------------


def twin_config(config: ModelConfig) -> ModelConfig:
    """A config with the same layers, heads and vocabulary, and minimal inner sizes."""
    return replace(
        config,
        hidden_size=TWIN_SIZE,
        intermediate_size=TWIN_SIZE,
        rope=RopeConfig(theta=config.rope.theta),
        sliding_windows=(),
    )


def twin_of(config: ModelConfig, dtype: str, batch: int, tokenizer: str | None) -> DecodeSteps:
    """An engine of the twin, ready to be timed; it detokenizes if the model has a tokenizer."""
    with TemporaryDirectory() as folder:
        fields = huggingface_config(twin_config(config), dtype)
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        if tokenizer is None:
            write_tokenizer(config, Path(folder))
        return DecodeSteps(
            EngineArgs(
                folder,
                tokenizer=tokenizer,
                load_format="dummy",
                dtype=dtype,
                device="cpu",
                max_model_len=2 * TWIN_CONTEXT,
                max_num_seqs=batch,
                num_gpu_blocks_override=batch * 2,
                enable_prefix_caching=False,
            ),
            detokenize=tokenizer is not None,
        )


def clocked(run: Callable[[], Sequence[object]]) -> float:
    """Seconds of one call."""
    start = perf_counter()
    run()
    return perf_counter() - start
