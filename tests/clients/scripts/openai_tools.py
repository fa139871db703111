"""OpenAI's client with tools, unchanged: prints what it got as JSON. Arguments: the server's
address, the model, and the Python block of the guide, which it runs first."""

import json
import sys

import openai

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def main(address: str, model: str, guide: str) -> None:
    """Call tools whole and streamed, and return their results."""
    names: dict = {}
    guide = guide.replace('"smollm2"', repr(model)).replace('"none")', '"secret")', 1)
    exec(guide.replace("http://localhost:8000", address).replace("print(", "("), names)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)
    messages: list = [{"role": "user", "content": "Is it warm?"}]
    common = {"model": model, "tools": TOOLS, "temperature": 0.0, "max_tokens": 120}
    found: dict = {"guide": [type(each).__name__ for each in names["messages"]], "calls": []}
    for choice in (NAMED, "required", "auto"):
        common |= {"tool_choice": choice, "parallel_tool_calls": False, "messages": messages}
        with client.chat.completions.stream(
            **{k: v for k, v in common.items()}, stream_options={"include_usage": True}
        ) as stream:
            try:
                streamed = stream.get_final_completion().choices[0].message
            except openai.LengthFinishReasonError as error:  # which is how the client stops
                streamed = error.completion.choices[0].message
        whole = client.chat.completions.create(**common).choices[0]
        calls = whole.message.tool_calls or []
        found["calls"].append([[each.function.name, each.function.arguments] for each in calls])
        again = [
            [each.function.name, each.function.arguments] for each in streamed.tool_calls or []
        ]
        assert again == found["calls"][-1], (again, found)
        assert (streamed.content or "") == (whole.message.content or "")
        assert whole.finish_reason == ("tool_calls" if calls else whole.finish_reason)
        messages.append(whole.message)
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "4 degrees"})
    try:
        client.chat.completions.create(**(common | {"tool_choice": "always"}))
    except openai.BadRequestError as error:
        found["error"] = error.message
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
