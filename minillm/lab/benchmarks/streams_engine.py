"""``python -m minillm.lab.benchmarks.streams_engine MODEL`` runs `LLM.generate` for the benchmark
of streams: a line of JSON per request, and one per answer (see peers/protocol.py)."""

import json
import sys
from time import perf_counter

from minillm import LLM, SamplingParams
from minillm.lab.benchmarks.peers.protocol import end_with_parent, private_stdout


def main(model: str) -> None:
    """Answer requests until the end of the input."""
    end_with_parent()
    answers = private_stdout()
    llm = LLM(model)
    for line in sys.stdin:
        request = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=request["new_tokens"], ignore_eos=True)
        start = perf_counter()
        outputs = llm.generate(request["prompts"], params, use_tqdm=False)
        seconds = perf_counter() - start
        texts = [each.outputs[0].text for each in outputs]
        answers.write(json.dumps({"ok": {"seconds": seconds, "texts": texts}}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
