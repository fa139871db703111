"""Commands and options that are no more, each with what to use instead."""

from collections.abc import Mapping
from types import MappingProxyType

DRAFTS = "'minillm bench speculation' measures what drafts save"
REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "minillm node": "start several machines with torchrun, which runs the same command on "
        "each: torchrun --nnodes 2 ... -m minillm generate ... -tp 2",
        "minillm bench scale": "'minillm bench decode --batch 1,16,64 --context 128,8192' measures "
        "the same steps",
        "minillm bench startup": "'time minillm generate TEXT --max-tokens 2' measures a start",
        "minillm bench speculation --vs": "'minillm bench decode --vs transformers' compares plain "
        "decoding",
        "minillm bench speculation --acceptance": "speculative_config takes "
        "rejection_sample_method='synthetic'",
        "minillm bench serve --ramp": "give several rates: --request-rate 1,2,4,8",
        "minillm bench serve --replay": "'--burstiness 0.5' gives bursts, and 'vllm bench serve' "
        "plays recorded data sets",
        "minillm bench offline --lengths": "'make gpu' has nano-vllm's uniform lengths",
        "minillm bench serve --dollars-per-hour": "divide 3600 times the printed tokens/s by the "
        "price of an hour",
        "minillm bench serve --steady-ratio": "--warmup leaves out the first requests",
        "minillm plan --load": "in Python, llm.plan() is the plan of a loaded model, and "
        "llm.engine.allocated() what it took",
        "minillm plan --speculate": DRAFTS,
        "minillm plan --acceptance": DRAFTS,
        "minillm plan --answered": DRAFTS,
    }
)


def message(name: str) -> str:
    """The sentence for a command or option, as "minillm plan --speculate"; empty if there was none
    of this name."""
    return f"{name!r} was removed; {REMOVED[name]}." if name in REMOVED else ""
