"""lm-eval's `local-completions`, unchanged, on a task of four texts: prints its scores as JSON.

Arguments: the server's address, the folder of the tokenizer, pairs of context and continuation.
"""

import json
import os
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PROMPT = "def fib(n):"


def main(address: str, folder: str, pairs: list[list[str]]) -> None:
    """Log-likelihoods of continuations, and one generation."""
    os.environ["OPENAI_API_KEY"] = "secret"
    model = LocalCompletionsAPI(
        base_url=f"{address}/v1/completions",
        model="tiny",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        num_concurrent=1,
        max_length=2048,
        batch_size=2,
    )
    scoring = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)]
    options = {"until": ["\n\n"], "max_gen_toks": 24, "temperature": 0}
    generating = [Instance("generate_until", {}, (PROMPT, options), 0)]
    scores = [[float(value), bool(greedy)] for value, greedy in model.loglikelihood(scoring)]
    print(json.dumps({"scores": scores, "texts": model.generate_until(generating)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
