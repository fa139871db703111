"""OpenAI's client, unchanged: prints what it got as JSON. Argument: the server's address."""

import json
import sys

import openai

PROMPT = "def fib(n):"


def main(address: str) -> None:
    """Call every feature that the server has, and those that it refuses."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=2)
    name = client.models.list().data[0].id
    common = {"model": name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.0}
    plain = client.completions.create(**common)
    stream = list(
        client.completions.create(**common, stream=True, stream_options={"include_usage": True})
    )
    several = client.completions.create(**(common | {"temperature": 1.0}), n=3, seed=7)
    stopped = client.completions.create(**common, stop=[" of"])
    scored = client.completions.create(**common, logprobs=3)
    found = {
        "model": client.models.retrieve(name).id,
        "text": plain.choices[0].text,
        "usage": plain.usage.model_dump(),
        "streamed": "".join(each.choices[0].text for each in stream if each.choices),
        "stream_usage": stream[-1].usage.total_tokens,
        "several": [each.text for each in several.choices],
        "stopped": [stopped.choices[0].text, stopped.choices[0].finish_reason],
        "logprobs": scored.choices[0].logprobs.model_dump(),
    }
    errors = {
        "template": lambda: client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "hi"}]
        ),
        "temperature": lambda: client.completions.create(**(common | {"temperature": -1.0})),
        "model": lambda: client.completions.create(**(common | {"model": "gpt-9"})),
        "length": lambda: client.completions.create(**(common | {"prompt": "word " * 5000})),
        "key": lambda: openai.OpenAI(base_url=f"{address}/v1", api_key="wrong").models.list(),
    }
    for what, call in errors.items():
        try:
            call()
        except openai.APIStatusError as error:
            found[f"error {what}"] = [type(error).__name__, error.status_code, error.message]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
