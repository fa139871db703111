"""LiteLLM, unchanged: prints what it got as JSON. Argument: the server's address."""

import json
import sys

import litellm

PROMPT = "def fib(n):"


def main(address: str) -> None:
    """Complete a text, whole and streamed."""
    common = {
        "model": "text-completion-openai/tiny",
        "prompt": PROMPT,
        "api_base": f"{address}/v1",
        "api_key": "secret",
        "max_tokens": 24,
        "temperature": 0.0,
    }
    plain = litellm.text_completion(**common)
    pieces = litellm.text_completion(**common, stream=True)
    streamed = "".join(each.choices[0].text or "" for each in pieces if each.choices)
    print(json.dumps({"text": plain.choices[0].text, "streamed": streamed}))


if __name__ == "__main__":
    main(sys.argv[1])
