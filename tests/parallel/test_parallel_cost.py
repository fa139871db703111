"""The cost of several devices: formulas by hand, published tables, and real ranks of a model."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from minillm import ops
from minillm.api.arguments import EngineArgs
from minillm.config import MoEConfig
from minillm.errors import ConfigError
from minillm.lab.expert_load import expert_balance, most_experts_read, ranks_of_a_token
from minillm.lab.hardware import DATASHEET
from minillm.lab.links import (
    LINKS,
    Direct,
    Link,
    all_gather_seconds,
    all_reduce,
    all_reduce_seconds,
    all_to_all_seconds,
    find_link,
    send_seconds,
)
from minillm.lab.parallel_cost import Devices, decode_time, predict, prefill_time
from minillm.lab.parallel_layout import (
    Layout,
    check_layout,
    cut_layers,
    device_config,
    device_memory,
    matrices_in,
)
from minillm.lab.roofline import step_cost, step_time
from minillm.models.checkpoint import open_model
from minillm.models.presets import PRESETS, preset
from minillm.parallel.communicator import ThreadGroup
from minillm.parallel.place import Place
from minillm.parallel.rank import load_rank
from minillm.plan.cost import weight_bytes
from minillm.plan.parameters import parameter_count

H100, H200 = DATASHEET["h100-sxm"], DATASHEET["h200"]
NVLINK, PCIE = LINKS["nvlink"], LINKS["pcie"]
LLAMA70B, LLAMA405B = preset("llama-3.1-70b"), preset("llama-3.1-405b")
V3 = preset("deepseek-v3")
SIX_EXPERTS = replace(V3, moe=MoEConfig(6, 2, intermediate_size=2048))
EVEN = replace(LLAMA70B, vocab_size=64)  # stages of equally many layers
KB, MB = 1024, 2**20
PLAIN = Link("plain", latency=5.0, hop=1.0, bandwidth=10.0, source="", algorithms=("ring", "tree"))
READING = replace(PLAIN, direct=Direct(latency=1.0, per_device=0.5, bandwidth=2.0))
ONLY_CALLS = Link("calls", latency=1.0, hop=0.0, bandwidth=1e30, source="")
ONLY_BYTES = Link("bytes", latency=0.0, hop=0.0, bandwidth=1.0, source="")


def recorded(hardware, link, tensor=1, pipeline=1, **more):
    """Devices whose steps are recorded, as in the published table."""
    return Devices(hardware, link, Layout(tensor, pipeline), is_recorded=True, **more)


# ---- links -------------------------------------------------------------------------------------


def test_formulas_of_a_sum():
    seconds = {each: all_reduce_seconds(READING, 8, 16.0, each)
               for each in ("ring", "tree", "one-shot", "two-shot")}  # fmt: skip
    assert seconds == {
        "ring": 5 + 14 * 1 + 2 * 7 / 8 * 16 / 10,
        "tree": 5 + 2 * 3 * 1 + 2 * 16 / 10,
        "one-shot": (1 + 8 * 0.5) + 7 * 16 / 2,
        "two-shot": 2 * (1 + 8 * 0.5) + 2 * 7 / 8 * 16 / 2,
    }
    assert all_reduce_seconds(PLAIN, 5, 0.0, "tree") == 5 + 2 * 3  # three levels hold five


def test_formulas_of_other_exchanges():
    assert send_seconds(PLAIN, 20.0) == 5 + 1 + 2
    assert all_gather_seconds(PLAIN, 4, 20.0) == 5 + 3 * 1 + 3 * 20 / 10
    assert all_to_all_seconds(PLAIN, 4, 20.0) == 5 + 3 * 1 + 20 / 10
    assert all_to_all_seconds(READING, 4, 2.0) == (1 + 4 * 0.5) + 2 / 2  # the kernel is faster
    assert all_gather_seconds(READING, 4, 2.0) == (1 + 4 * 0.5) + 3 * 2 / 2


def test_a_link_is_found_by_its_name():
    assert find_link(" NVLink ") is NVLINK


def test_one_device_sends_nothing():
    assert all_reduce(NVLINK, 1, 1e9).seconds == 0
    assert all_gather_seconds(NVLINK, 1, 1e9) == all_to_all_seconds(NVLINK, 1, 1e9) == 0


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_fastest_sum_is_chosen_and_more_bytes_take_longer(link, size):
    before = 0.0
    for exponent in range(8, 32):
        found = all_reduce(link, size, 2**exponent)
        offered = [*link.algorithms, *(("one-shot", "two-shot") if link.direct else ())]
        times = [all_reduce_seconds(link, size, 2**exponent, each) for each in offered]
        assert found.seconds == min(times) > before
        before = found.seconds


# Microseconds for n = 2, 4, 8: a kernel on H100s; the 512 KB were not used to fit it.
KERNEL = {4: (3.9, 3.7, 5.7), 32: (4.5, 4.8, 7.8), 256: (7.9, 13.9, 16.7),
          512: (12.5, 20.2, 22.1), 1024: (19.9, 31.1, 33.8)}  # fmt: skip
LIBRARY = {(4, 0.5): 21, (4, 1): 23, (4, 2): 28, (4, 4): 39, (8, 1): 32.4, (8, 4): 59.4,
           (8, 8): 90.5, (8, 16): 135.7}  # fmt: skip


@pytest.mark.parametrize(("kilobytes", "times"), KERNEL.items())
def test_the_kernel_is_within_15_percent_of_what_was_measured(kilobytes, times):
    for size, micros in zip((2, 4, 8), times, strict=True):
        found = min(all_reduce_seconds(NVLINK, size, kilobytes * KB, each)
                    for each in ("one-shot", "two-shot"))  # fmt: skip
        assert found == pytest.approx(micros * 1e-6, rel=0.15)


@pytest.mark.parametrize(("size", "megabytes"), LIBRARY)
def test_the_library_is_within_25_percent_of_what_was_measured(size, megabytes):
    found = all_reduce_seconds(NVLINK, size, megabytes * MB, "ring")
    assert found == pytest.approx(LIBRARY[size, megabytes] * 1e-6, rel=0.25)


NAN = float("nan")
REFUSED = [  # (call, its arguments, options, what the error says)
    (find_link, ("nvlnk",), {}, r"no link 'nvlnk'. Did you mean 'nvlink'\?"),
    (replace, (PLAIN,), {"bandwidth": 0.0}, "bandwidth is positive"),
    (replace, (PLAIN,), {"hop": NAN}, "times are at least 0"),
    (replace, (PLAIN,), {"algorithms": ()}, "no algorithm"),
    (all_reduce_seconds, (PCIE, 2, 1.0, "one-shot"), {}, "one-shot is not possible; use ring"),
    *((all_reduce, (PCIE, *sent), {}, "it needs at least 1 device")
      for sent in ((0, 1.0), (2, -1.0), (2, NAN))),
    *((Layout, sizes, {}, "both must be at least 1") for sizes in ((0,), (1, -1))),
    (Layout, (2,), {"own_attention": True}, "set expert_parallel=True, too"),
    *((decode_time, (LLAMA70B, Devices(H100, NVLINK)), wrong, "must be at least 1") for wrong in
      ({"batch": 0}, {"context": 0}, {"batch": 2, "num_groups": 3}, {"num_groups": -1})),
    *((prefill_time, (LLAMA70B, Devices(H100, NVLINK)), wrong, "num_chunks from 1 to num_tokens")
      for wrong in ({"num_tokens": 0}, {"num_tokens": 3, "num_chunks": 4}, {"num_chunks": 0})),
]  # fmt: skip


@pytest.mark.parametrize(("call", "given", "options", "message"), REFUSED)
def test_what_cannot_be_is_refused(call, given, options, message):
    with pytest.raises(ConfigError, match=message):
        call(*given, **options)


# ---- what a device holds -----------------------------------------------------------------------

SMALL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
FAMILIES = {
    "llama": {},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek": {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "moe_intermediate_size": 16,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 12,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_of_a_real_model_holds_what_is_counted(family, size, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | FAMILIES[family]))
    source = open_model(str(tmp_path))
    args = EngineArgs(str(tmp_path), load_format="dummy", tensor_parallel_size=size)

    def held(communicator):
        model = load_rank(args, source, torch.float32, torch.device("cpu"), 64, Place(communicator))
        tensors = [*model.parameters(), *(
            each for name, each in model.named_buffers() if "bias" in name)]  # fmt: skip
        return sum(each.numel() for each in tensors)

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(held, ThreadGroup(size, patience=20).communicators()))
    mine = device_config(source.config, Layout(size))
    assert parameter_count(mine).total == found[0] == max(found)


@pytest.mark.parametrize("name", ["llama-3.1-70b", "llama-3.1-405b", "deepseek-v3", "qwen3-0.6b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_stages_hold_every_layer_once_and_nearly_equal_bytes(name, stages):
    config = preset(name)
    cut = cut_layers(config, stages)
    assert [layer for each in cut for layer in each] == [*range(config.num_layers)]
    assert len(cut) == stages
    sizes = [parameter_count(device_config(config, Layout(1, stages), each)).total for each in cut]
    table = config.vocab_size * config.hidden_size
    twice = stages > 1 and config.tie_word_embeddings  # both ends keep the table
    slack = config.num_layers * config.hidden_size  # norms and places that no stage needs
    assert sum(sizes) == pytest.approx(parameter_count(config).total + twice * table, abs=slack)


def test_a_stage_keeps_the_windows_of_its_layers():
    config = replace(preset("mistral-7b"), sliding_windows=tuple(range(1, 33)))
    part = device_config(config, Layout(1, 4), range(8, 16))
    assert part.sliding_windows == tuple(range(9, 17))
    moe = device_config(V3, Layout(1, 8), range(2, 5))
    assert moe.moe_layers == (False, True, True)


def test_kv_heads_are_replicated_below_one_and_latents_always():
    per_token = [device_memory(LLAMA70B, 80 * 10**9, Layout(n)).kv_bytes_per_token
                 for n in (1, 2, 4, 8, 16, 32)]  # fmt: skip
    assert per_token == [327_680, 163_840, 81_920, 40_960, 40_960, 40_960]
    latent = [device_memory(V3, H200.memory_bytes, Layout(n)).kv_bytes_per_token for n in (1, 8)]
    assert latent == [70_272, 70_272]


def test_memory_of_a_pipeline_is_that_of_its_fullest_stage():
    plan = device_memory(LLAMA70B, 80 * 10**9, Layout(2, 2), max_model_len=8192)
    stages = [device_config(LLAMA70B, Layout(2, 2), each) for each in cut_layers(LLAMA70B, 2)]
    assert [stage.num_layers for stage in stages] == [41, 39]  # as the output matrix is read
    assert plan.weight_bytes == max(map(weight_bytes, stages))
    assert plan.weight_bytes == pytest.approx(weight_bytes(LLAMA70B) / 4, rel=0.04)
    assert plan.kv_bytes_per_token == 327_680 / 80 * 41 / 2


def test_deepseek_v3_on_eight_h200():
    """In FP8: 85 GB of weights by tensors, 101 GB with attention of each one's own, which caches
    4.8 times as many tokens; 128 sequences of 4,096 tokens take 29.7 and about 23.5 ms."""
    shared, own = Layout(8), Layout(8, 1, True, True)
    fp8 = matrices_in(1)
    plans = [device_memory(V3, H200.memory_bytes, each, weights=fp8) for each in (shared, own)]
    assert plans[0].weight_bytes == pytest.approx(85e9, rel=0.005)
    assert plans[1].weight_bytes == pytest.approx(101e9, rel=0.005)
    assert 8 * plans[1].num_tokens / plans[0].num_tokens == pytest.approx(4.8, rel=0.04)
    machines = [Devices(H200, NVLINK, each, is_recorded=True, weights=fp8)
                for each in (shared, own)]  # fmt: skip
    times = [decode_time(V3, each, batch=128, context=4096).seconds for each in machines]
    assert times == pytest.approx([29.7e-3, 23.5e-3], rel=0.02)


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (LLAMA70B, Layout(3), "tensor_parallel_size is 3, which does not divide 64 attention"),
        (LLAMA70B, Layout(1, 81), "pipeline_parallel_size is 81; it must be at most 80"),
        (LLAMA70B, Layout(2, 1, True), "has no experts; leave"),
        (V3, Layout(3, 1, True, True), "does not divide 256 experts of 2048 units"),
        (SIX_EXPERTS, Layout(4, 1, True, True), "does not divide 6 experts of 2048 units"),
        (SIX_EXPERTS, Layout(4, 1, True), "does not divide 6 experts of 2048 units"),
    ],
)
def test_a_layout_that_cannot_be(config, layout, message):
    devices = Devices(H100, NVLINK, layout)
    for call in (
        lambda: check_layout(config, layout),
        lambda: decode_time(config, devices),
        lambda: prefill_time(config, devices),
        lambda: device_memory(config, 10**12, layout),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


# ---- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("link", [NVLINK, PCIE], ids=["nvlink", "pcie"])
def test_one_device_takes_what_the_plan_says(name, link):
    config, devices = preset(name), Devices(H100, link)
    decode = decode_time(config, devices, batch=7, context=900)
    assert decode.seconds == step_time(step_cost(config, [1] * 7, [900] * 7), H100).seconds
    prompt = prefill_time(config, devices, num_tokens=900)
    assert prompt.seconds == step_time(step_cost(config, [900], [900]), H100).seconds
    assert decode.communication == prompt.communication == 0
    assert decode.utilisation == prompt.utilisation == 1
    assert decode.tokens_per_second == 7 / decode.seconds


# Milliseconds of a decode step for TP 1, 2, 4, 8, and the percentage of communication at TP 8.
TABLE = {
    ("llama-3.1-70b", "h100-sxm", "nvlink", 1): (41.6, 21.5, 11.1, 6.3, 17),
    ("llama-3.1-70b", "h100-sxm", "nvlink", 64): (47.9, 27.2, 17.0, 11.4, 48),
    ("llama-3.1-70b", "h100-sxm", "pcie", 1): (41.6, 24.9, 14.6, 9.4, 45),
    ("llama-3.1-70b", "h100-sxm", "pcie", 64): (47.9, 34.7, 26.1, 21.8, 73),
    ("llama-3.1-70b", "h200", "nvlink", 1): (29.0, 15.2, 7.9, 4.7, 23),
    ("llama-3.1-70b", "h200", "nvlink", 64): (33.4, 19.9, 13.4, 9.6, 57),
    ("llama-3.1-405b", "h200", "nvlink", 1): (168, 85, 43, 23, 9),
    ("llama-3.1-405b", "h200", "nvlink", 64): (175, 93, 52, 30, 28),
    ("llama-3.1-8b", "h200", "pcie", 64): (4.9, 5.5, 4.9, 4.6, 87),
}


@pytest.mark.parametrize("row", TABLE)
def test_decode_table(row):
    name, machine, link, batch = row
    *expected, percent = TABLE[row]
    found = [
        decode_time(preset(name), recorded(DATASHEET[machine], LINKS[link], n), batch=batch)
        for n in (1, 2, 4, 8)
    ]
    assert [each.seconds * 1e3 for each in found] == pytest.approx(expected, rel=0.1)
    assert found[-1].communication * 100 == pytest.approx(percent, abs=5)


@pytest.mark.parametrize(
    ("link", "expected"), [("nvlink", (300, 166, 99, 65)), ("pcie", (300, 370, 403, 420))]
)
def test_prefill_table(link, expected):
    found = [prefill_time(LLAMA70B, recorded(H100, LINKS[link], n)).seconds for n in (1, 2, 4, 8)]
    assert [each * 1e3 for each in found] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("config", [LLAMA70B, V3], ids=["dense", "moe"])
def test_collectives_of_a_step(config):
    """Two sums per layer, one for the embedding, one gather: claim K2."""
    (stage,) = decode_time(config, recorded(H100, ONLY_CALLS, 4), batch=3, context=9).stages
    assert stage.communication == pytest.approx(2 * config.num_layers + 2)
    moved = decode_time(config, recorded(H100, ONLY_BYTES, 4), batch=3, context=9).stages[0]
    row = config.hidden_size * 2
    sums = (2 * config.num_layers + 1) * 2 * 3 / 4 * 3 * row
    assert moved.communication == pytest.approx(sums + 3 * 3 * 16)


def test_share_of_communication():
    """Of a prompt, and of the stage that all wait for; 0.1 s for each collective."""
    link = replace(ONLY_CALLS, latency=0.1)
    prompt = prefill_time(LLAMA70B, recorded(H100, link, 4))
    assert prompt.communication == pytest.approx(16.2 / prompt.seconds)
    many = decode_time(LLAMA70B, recorded(H100, link, 4, 2), batch=64, num_groups=8)
    slowest = max(many.stages, key=lambda each: each.seconds)
    assert many.seconds == 8 * slowest.seconds
    assert many.communication == slowest.communication / slowest.seconds > 0.9


@pytest.mark.parametrize(("groups", "share"), [(1, 0.25), (2, 0.5), (4, 1.0), (8, 1.0)])
def test_a_stage_works_while_it_has_a_group(groups, share):
    """Utilisation while decoding: min(1, m / p)."""
    free = replace(ONLY_CALLS, latency=0.0)
    found = decode_time(EVEN, recorded(H100, free, 1, 4), batch=64, num_groups=groups)
    assert found.utilisation == pytest.approx(share, abs=0.01)
    assert found.num_groups == groups


@pytest.mark.parametrize(("chunks", "share"), [(1, 0.25), (4, 0.57), (64, 0.96)])
def test_a_pipeline_fills_and_empties(chunks, share):
    """Claim K5: m / (m + p - 1) for m chunks of equal cost; few tokens cost what weights do."""
    free = replace(ONLY_CALLS, latency=0.0)
    found = prefill_time(
        EVEN, recorded(H100, free, 1, 4), num_tokens=16 * chunks, num_chunks=chunks
    )
    assert found.utilisation == pytest.approx(share, abs=0.01)


def test_stages_make_no_request_faster_and_send_little():
    one = decode_time(LLAMA70B, recorded(H100, NVLINK))
    four = decode_time(LLAMA70B, recorded(H100, NVLINK, 1, 4))
    assert four.seconds == pytest.approx(one.seconds, rel=0.01)
    assert four.seconds > one.seconds
    calls = decode_time(LLAMA70B, recorded(H100, ONLY_CALLS, 1, 4))
    assert [stage.communication for stage in calls.stages] == [1, 1, 1, 1]
    moved = decode_time(LLAMA70B, recorded(H100, ONLY_BYTES, 1, 4))
    assert [stage.communication for stage in moved.stages] == [16_384, 16_384, 16_384, 8]  # K4


def test_stages_and_tensors_together():
    """Sums of its own layers in each stage, the embedding's in the first, the choice in the last,
    and a send over the other link."""
    devices = replace(recorded(H100, ONLY_CALLS, 2, 2), stage_link=replace(ONLY_CALLS, latency=0.5))
    found = decode_time(LLAMA70B, devices, batch=2)
    assert [each.communication for each in found.stages] == [82 + 1 + 0.5, 78 + 1 + 0.5]
    assert found.num_groups == 2
    slowest = max(each.seconds for each in found.stages)
    assert found.seconds == max(2 * slowest, sum(each.seconds for each in found.stages))


# ---- experts -----------------------------------------------------------------------------------


def test_load_of_experts_equals_a_simulation():
    rng = np.random.default_rng(0)
    for size, tokens in ((8, 1), (8, 8), (8, 64), (4, 16)):
        most_rows, most_read, visited = [], [], []
        for _ in range(300):
            chosen = rng.random((tokens, 64)).argsort(-1)[:, :4]
            rows = np.bincount(chosen.ravel() // (64 // size), minlength=size)
            read = np.bincount(np.unique(chosen) // (64 // size), minlength=size)
            most_rows.append(rows.max())
            most_read.append(read.max())
            visited.append(np.mean([len(set(each // (64 // size))) for each in chosen]))
        mean = tokens * 4 / size
        assert mean / expert_balance(64, 4, size, tokens) == pytest.approx(
            np.mean(most_rows), rel=0.12
        )
        assert most_experts_read(64, 4, size, tokens) == pytest.approx(np.mean(most_read), rel=0.15)
        assert ranks_of_a_token(size, 4) == pytest.approx(np.mean(visited), rel=0.05)


@pytest.mark.parametrize(("experts", "chosen", "groups", "top"), [(256, 8, 8, 4), (64, 4, 4, 2)])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_load_of_experts_in_groups_equals_the_router(experts, chosen, groups, top, size):
    scores = torch.rand(2048, experts, generator=torch.Generator().manual_seed(0))
    ids = ops.moe_route(scores, None, chosen, groups, top, "top2", True)[1]
    ranks = (ids // (experts // size)).numpy()
    visited = np.mean([len(set(each)) for each in ranks])
    assert ranks_of_a_token(size, chosen, groups, top) == pytest.approx(visited, rel=0.05)
    for tokens in (8, 64):
        steps = ranks.reshape(2048 // tokens, -1)
        most = np.mean([np.bincount(each, minlength=size).max() for each in steps])
        balance = expert_balance(experts, chosen, size, tokens, groups, top)
        assert tokens * chosen / size / balance == pytest.approx(most, rel=0.09)


def test_whole_experts_read_what_the_fullest_device_reads():
    """One sequence: of its 8 experts a device reads an eighth as tensors; as whole experts, the
    device with the most of them 2.4."""
    split, whole = (
        decode_time(V3, Devices(H200, NVLINK, Layout(8, 1, each), is_recorded=True)).stages[0]
        for each in (False, True)
    )
    expert = 3 * 7168 * 2048 * 2
    more = whole.cost.weight_bytes - split.cost.weight_bytes
    assert more == pytest.approx(58 * expert * (most_experts_read(256, 8, 8, 1) - 1), rel=1e-3)
    assert most_experts_read(256, 8, 8, 1) == pytest.approx(2.4, abs=0.1)
    assert whole.communication == split.communication  # no all-to-all: tokens are everywhere
    macs = 2 * 58 * 3 * 7168 * 2048 * (1 / expert_balance(256, 8, 8, 1, 8, 4) - 1)
    assert whole.cost.linear_flops - split.cost.linear_flops == pytest.approx(macs, rel=1e-3)


def test_whole_experts_on_one_device_change_nothing():
    plain, whole = (decode_time(V3, Devices(H200, NVLINK, Layout(1, 1, e))) for e in (False, True))
    assert plain == whole


def test_own_attention_splits_sequences_and_sends_to_experts():
    layout = Layout(8, 1, True, True)
    calls = decode_time(V3, replace(recorded(H200, ONLY_CALLS), layout=layout), batch=64)
    assert calls.stages[0].communication == 58 * 2 + 1  # all-to-alls, and one MAX for all
    moved = decode_time(V3, replace(recorded(H200, ONLY_BYTES), layout=layout), batch=64)
    sent = 58 * 2 * 8 * ranks_of_a_token(8, 8, 8, 4) * 7 / 8 * 7168 * 2
    assert moved.stages[0].communication == pytest.approx(sent, rel=1e-4)
    alone = step_cost(V3, [1] * 8, [1024] * 8)
    assert moved.stages[0].cost.kv_read_bytes == alone.kv_read_bytes
    experts = parameter_count(V3).experts * 2
    whole = device_config(V3, layout)
    assert weight_bytes(whole) == weight_bytes(V3) - experts * 7 // 8
    read = moved.stages[0].cost.weight_bytes
    assert read == pytest.approx(
        alone.weight_bytes
        - experts * (1 - (1 - 8 / 256) ** 8)
        + experts / 256 * most_experts_read(256, 8, 8, 64),
        rel=1e-3,
    )


# ---- predictions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "hardware", "layout", "batch", "holds"),
    [
        ("llama-3.1-70b", "h100-sxm", Layout(4), 64, True),
        ("llama-3.1-70b", "h100-sxm", Layout(1), 1, False),
        ("llama-3.1-405b", "h200", Layout(8), 64, True),
        ("llama-3.1-405b", "h100-sxm", Layout(8), 1, False),
    ],
)
def test_what_large_models_hold(model, hardware, layout, batch, holds):
    found = predict(preset(model), Devices(DATASHEET[hardware], NVLINK, layout, is_recorded=True))
    assert found.holds(batch) == holds
    if (model, layout.tensor) == ("llama-3.1-70b", 4):
        assert found.decode[1].seconds == pytest.approx(11.1e-3, rel=0.1)


def test_own_attention_holds_more_tokens():
    shared, own = (
        predict(V3, Devices(H200, NVLINK, layout, is_recorded=True, weights=matrices_in(1)))
        for layout in (Layout(8), Layout(8, 1, True, True))
    )
    assert shared.holds(64)
    assert own.holds(64)
    assert own.cache_tokens == 8 * own.memory.num_tokens > 4 * shared.cache_tokens


def test_room_is_in_whole_blocks():
    made = predict(LLAMA70B, Devices(H100, NVLINK, Layout(2)), context=1024)
    assert made.memory.num_tokens == 7120  # 445 blocks of 16, of which a sequence takes 64
    assert [made.holds(batch) for batch in (6, 7)] == [True, False]
    odd = replace(made, context=1009)  # 64 blocks, too
    assert [odd.holds(batch) for batch in (6, 7)] == [True, False]
    tight = replace(made, context=7113)
    assert tight.holds(1)
    assert not replace(made, context=7121).holds(1)


def test_launches_count_unless_recorded():
    eager, graph = (
        decode_time(LLAMA70B, Devices(H100, NVLINK, Layout(4), is_recorded=each)).seconds
        for each in (False, True)
    )
    assert eager - graph == pytest.approx(401 * 5e-6)


def test_a_batch_through_stages_takes_all_groups():
    found = decode_time(LLAMA70B, recorded(H100, NVLINK, 1, 4), batch=64)
    rows = step_cost(LLAMA70B, [1] * 16, [1024] * 16)
    bound = step_time(rows, H100, 0).seconds
    assert found.seconds == pytest.approx(bound, rel=0.1)  # 4 groups x a quarter of the model
    assert found.tokens_per_second == pytest.approx(64 / bound, rel=0.1)
