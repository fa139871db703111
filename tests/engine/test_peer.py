"""The same requests through transformers' own continuous batching give the same tokens.

`generate_batch` is an engine like ours: it pages its cache, shares the blocks of equal prefixes and
mixes prefill with decode. It runs on a CPU with the attention implementations "sdpa" and "eager".

It has no pages for MLA: in version 5.23 every page has K and V of `head_dim` values, which MLA's
keys are not, and all requests of a deepseek_v2 fail with an index_copy_() of different shapes. For
that family transformers' plain `generate` stands in.
"""

import random
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from minillm import LLM, SamplingParams
from minillm.models.checkpoint import open_model
from tests.matrix import cells
from tests.matrix.cells import MARGIN

NUM_REQUESTS = 64
NUM_NEW = 16
PAGE = 16
PEERS = [
    ("llama", "sdpa"),
    ("qwen3_moe", "sdpa"),
    pytest.param("tiny", "sdpa", marks=pytest.mark.slow),
    pytest.param("llama", "eager", marks=pytest.mark.slow),
]

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def folder_of(family: str) -> Path:
    """The checkpoint of a family, which both engines read."""
    found = open_model("tiny").folder if family == "tiny" else cells.folder_of(family)
    assert isinstance(found, Path)
    return found


def prompts_for(vocab_size: int) -> list[list[int]]:
    """64 prompts of 1 to 94 tokens; every third one begins with the same 24."""
    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(count)]

    shared = draw(24)
    lengths = [rng.choice([1, 3, 9, 20, 40, 70]) for _ in range(NUM_REQUESTS)]
    return [(shared if i % 3 == 0 else []) + draw(length) for i, length in enumerate(lengths)]


def load(folder: Path, attention: str) -> PreTrainedModel:
    """transformers' model in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    # The file of generation settings may name end tokens; here all requests are equally long.
    model.generation_config = GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    return model.eval()


def peer_tokens(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' continuous batching generates."""
    results = model.generate_batch(
        prompts,
        generation_config=model.generation_config,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=400, max_batch_tokens=128
        ),
    )
    by_number = sorted(results.values(), key=lambda result: int(result.request_id.split("_")[-1]))
    assert [result.prompt_ids for result in by_number] == prompts
    assert not any(result.error for result in by_number)
    return [list(result.generated_tokens) for result in by_number]


def near_tie(model: PreTrainedModel, ids: list[int], one: int, other: int) -> bool:
    """Whether two tokens are equally good to transformers, up to the margin, and the best."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    return bool(logits.max() - torch.min(logits[one], logits[other]) < MARGIN)


def compare(
    model: PreTrainedModel, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
) -> tuple[list[int], list[int]]:
    """Requests that differ, and those of them that part at a near tie."""
    differ, ties = [], []
    for index, (prompt, mine, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if mine == other:
            continue
        step = next((i for i in range(NUM_NEW) if mine[i : i + 1] != other[i : i + 1]), NUM_NEW)
        both = step < min(len(mine), len(other))
        tie = both and near_tie(model, [*prompt, *mine[:step]], mine[step], other[step])
        (ties if tie else differ).append(index)
    return differ, ties


def our_tokens(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts, and what our engine generates for them, many at a time."""
    llm = LLM(folder, dtype="float32", block_size=PAGE, max_num_seqs=32, max_model_len=256,
              max_num_batched_tokens=128, num_gpu_blocks_override=250)  # fmt: skip
    prompts = prompts_for(llm.engine.source.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counters = llm.engine.scheduler.counters
    assert counters.num_mixed_steps > 0
    assert counters.max_num_running == 32
    assert counters.num_cached_tokens > 0
    return prompts, [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(("family", "attention"), PEERS)
def test_64_greedy_requests_equal_transformers_continuous_batching(family, attention):
    prompts, ours = our_tokens(folder_of(family))
    model = load(folder_of(family), attention)
    theirs = peer_tokens(model, prompts)
    assert all(len(tokens) == NUM_NEW for tokens in theirs)
    differ, ties = compare(model, prompts, ours, theirs)
    assert not differ
    assert len(ties) <= 1
    # The comparison finds one wrong token in one request.
    wrong = [list(tokens) for tokens in ours]
    wrong[20][7] = (wrong[20][7] + 1) % model.config.vocab_size
    assert 20 in compare(model, prompts, wrong, theirs)[0]


def alone(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' plain `generate` gives, one request at a time."""
    return [model.generate(torch.tensor([prompt]))[0, len(prompt) :].tolist() for prompt in prompts]


def test_the_peer_generates_what_transformers_generates_alone():
    model = load(folder_of("llama"), "sdpa")
    prompts = prompts_for(model.config.vocab_size)[:16]
    differ, ties = compare(model, prompts, alone(model, prompts), peer_tokens(model, prompts))
    assert not differ
    assert len(ties) <= 1


@pytest.mark.slow
def test_greedy_requests_of_an_mla_model_equal_transformers_alone():
    prompts, ours = our_tokens(folder_of("deepseek_v2"))
    model = load(folder_of("deepseek_v2"), "sdpa")
    some = prompts[:24]
    differ, ties = compare(model, some, ours[:24], alone(model, some))
    assert not differ
    assert len(ties) <= 1
