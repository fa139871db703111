"""Cost of deterministic mode: milliseconds per step with the mode off and on."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from minillm.cli.terminal import Terminal
from minillm.execution.runner import runner_of
from minillm.lab.benchmarks.report import about_machine, benchmark_parser, write_result
from minillm.lab.benchmarks.step_times import Sizes, measure, opened
from minillm.models.deterministic import TiledDecoder

EXAMPLES = """examples:
  python -m minillm.lab.benchmarks.deterministic              two models, float32 and bfloat16
  python -m minillm.lab.benchmarks.deterministic --model DIR  a model's config, random weights
  python -m minillm.lab.benchmarks.deterministic --dtype float32 --json FILE
  python -m minillm.lab.benchmarks.deterministic --quick      small sizes, to check that it runs
"""
MADE_UP = "moe+mla"
MODELS = ("preset:smollm2-135m", MADE_UP)
# A small model with DeepSeek-V2's architecture; the presets with experts or MLA are too large.
MADE_UP_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "deepseek_v2", "architectures": ("DeepseekV2ForCausalLM",),
        "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1_408,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
        "max_position_embeddings": 4_096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "kv_lora_rank": 256, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "v_head_dim": 64, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "moe_intermediate_size": 256, "first_k_dense_replace": 1, "topk_method": "greedy",
        "rope_theta": 10_000.0, "torch_dtype": "bfloat16",
    }
)  # fmt: skip
SIZES, QUICK = Sizes((1, 16, 64), prefill=512), Sizes((1, 3), 8, 2, 3, 20)
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "off": MappingProxyType({}), "on": MappingProxyType({"deterministic": True}),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table, the conclusions and JSON."""
    parser = benchmark_parser("deterministic", __doc__, EXAMPLES)
    parser.add_argument("--model", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--dtype", action="append", metavar="NAME", help="may be repeated")
    chosen, terminal = parser.parse_args(arguments), Terminal()
    sizes = QUICK if chosen.quick else SIZES
    costs: list[dict[str, Any]] = []
    terminal.heading("Milliseconds per step with deterministic mode off and on")
    rows, tiles = [], []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(MADE_UP_CONFIG)), "utf-8")
        for model in chosen.model or (("tiny",) if chosen.quick else MODELS):
            for dtype in chosen.dtype or ("float32", "bfloat16"):
                path = folder if model == MADE_UP else model
                with (
                    terminal.progress(f"{model} in {dtype}"),
                    opened(path, dtype, sizes, VARIANTS) as engines,
                ):
                    found = list(measure(engines, sizes))
                    tiles.append(f"{model}, {dtype}: {tiles_of(engines['on'])}.")
                for one in found:
                    costs.append({"model": model, "dtype": dtype, **one.as_json()})
                    name = f"{model}, {dtype}, {one.step}"
                    rows.append([name, *one.row()[2:]])
    terminal.table(["", "off", "on", "ratio", "quartiles"], rows)
    least, *_, most = sorted((float(row[3]), row[0]) for row in rows)
    lines = [
        *tiles,
        f"A deterministic step takes from {least[0]:.2f} ({least[1]}) to {most[0]:.2f} "
        f"({most[1]}) times as long.",
    ]
    for line in lines:
        terminal.paragraph(line)
    result = about_machine("deterministic") | {"threads": torch.get_num_threads()}
    write_result(result | {"costs": costs, "statement": lines}, chosen.json, terminal)
    return 0


def tiles_of(llm: Any) -> str:
    """The tile sizes of matrix products."""
    model = runner_of(llm.engine.runner).model
    sizes = model.tiles if isinstance(model, TiledDecoder) else ()
    return f"tiles of {' or '.join(map(str, sizes))} rows" if sizes else "every row by itself"


if __name__ == "__main__":
    sys.exit(main())
