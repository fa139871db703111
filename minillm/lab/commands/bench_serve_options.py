"""The options of `minillm bench serve`, which loads a server.

They are apart from `bench_serve`, because the parser of `minillm bench` needs them on every start.
"""

from argparse import ArgumentParser

OWN = ("request_rate", "concurrency", "burstiness", "ramp", "replay", "duration", "workload",
       "endpoint", "prompts", "seed", "slo", "search", "target", "tolerance", "dollars_per_hour",
       "steady_ratio", "warmup", "served_model_name", "api_key", "timeout", "respect_eos",
       "vocab_size", "server_options", "label")  # fmt: skip
SHARED = ("requests", "repeats", "dtype", "plot")


def add_serve_options(parser: ArgumentParser) -> None:
    """Declare the options that only `serve` has."""
    group = parser.add_argument_group("serve (MODEL may be the URL of a running server)")
    option = group.add_argument
    option("--request-rate", metavar="1,2,4",
           help="offered loads in requests/s; inf sends all at once (4)")  # fmt: skip
    option("--concurrency", metavar="1,8",
           help="closed loop: requests at once; with --request-rate: the most at once")  # fmt: skip
    option("--burstiness", metavar="B", type=float,
           help="shape of gamma arrivals: below 1 bursty, 1 Poisson, inf constant (1)")  # fmt: skip
    option("--ramp", metavar="R1:R2", help="linear ramp between two rates")
    option("--replay", metavar="FILE", help="send at the timestamps of a JSONL trace")
    option("--duration", metavar="S", type=float,
           help="seconds of arrivals of each run, in place of --requests")  # fmt: skip
    option("--workload", metavar="NAME[:key=value,...]",
           help="lognormal, fixed, sharegpt, shared-prefix, chat or long-short (lognormal)",
           )  # fmt: skip
    option("--endpoint", metavar="NAME", help="completions or chat (completions)")
    option("--prompts", metavar="KIND", help="send prompts as ids or text (ids if possible)")
    option("--seed", metavar="N", type=int, help="seed of arrivals, lengths and prompts (0)")
    option("--slo", metavar="ttft=500ms,tpot=50ms", help="objectives, of ttft, tpot and e2el")
    option("--search", action="store_true", default=None,
           help="find the highest rate that keeps the target attainment of --slo")  # fmt: skip
    option("--target", metavar="X", type=float, help="target attainment (0.9)")
    option("--tolerance", metavar="X", type=float, help="relative tolerance of --search (0.05)")
    option("--dollars-per-hour", metavar="X", type=float,
           help="price of the machine, for tokens per dollar at the SLO")  # fmt: skip
    option("--steady-ratio", metavar="X", type=float,
           help="share of the peak concurrency that counts as steady (0.8)")  # fmt: skip
    option("--warmup", metavar="N", type=int,
           help="first requests of each run that are not evaluated (0)")  # fmt: skip
    option("--served-model-name", metavar="NAME", help="model to ask for (the server's first)")
    option("--api-key", metavar="KEY", help="key of the server")
    option("--timeout", metavar="S", type=float, help="seconds of a whole request (600)")
    option("--respect-eos", action="store_true", default=None,
           help="let the model end its output; lengths are then limits only")  # fmt: skip
    option("--vocab-size", metavar="N", type=int,
           help="send random ids below N, for a server without tokenizer")  # fmt: skip
    option("--server-options", metavar="TEXT",
           help='options of the server that is started, such as "--max-num-seqs 8"')  # fmt: skip
    option("--label", metavar="TEXT", help="hardware, for the figure (this machine's processor)")
