"""The server under load: is it there, which model does it serve, how does it tokenize."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError, NodeError, UnsupportedFeatureError, did_you_mean
from minillm.lab.benchmarks.serving.client import in_short, message_of
from minillm.lab.benchmarks.serving.prompts import WORDS, Vocabulary, any_ids, from_counts

if TYPE_CHECKING:
    import aiohttp

PROBE_SECONDS = 20.0


@dataclass(frozen=True)
class Target:
    """A server that answers.

    Attributes:
        root: name of the checkpoint, as the server reports it; it may equal `model`.
        longest: longest context in tokens; None if the server does not say.
        header: what the server calls itself.
    """

    url: str
    model: str
    root: str
    longest: int | None
    header: str


def base_url(text: str) -> str:
    """The address without ``/v1`` and a final slash."""
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def is_url(text: str | None) -> bool:
    """Whether the argument is the address of a server, not a model."""
    return text is not None and text.startswith(("http://", "https://"))


def key_headers(api_key: str | None) -> dict[str, str]:
    """The header for --api-key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@asynccontextmanager
async def session() -> AsyncIterator["aiohttp.ClientSession"]:
    """A session without a limit of connections; proxies of the environment are not used."""
    try:
        import aiohttp
    except ImportError as error:
        raise UnsupportedFeatureError(
            "'minillm bench serve' needs aiohttp, which is not installed; run "
            'pip install "minillm-course[serve]".'
        ) from error
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=2**20
    ) as made:
        yield made


async def ask(
    client: "aiohttp.ClientSession",
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: Any = None,
) -> tuple[int, Any, str]:
    """Status, JSON (None if it is none) and the server's name.

    Raises:
        NodeError: no server answers there.
    """
    import aiohttp

    data = None if body is None else json.dumps(body).encode()
    all_headers = {"Content-Type": "application/json", **headers}
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            request = client.request(method, url, data=data, headers=all_headers)
            async with request as response:
                text = await response.read()
                header = response.headers.get("Server", "")
    except TimeoutError as error:
        raise NodeError(
            f"{url} did not answer within {PROBE_SECONDS:g} seconds; check the server."
        ) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NodeError(
            f"No server answers at {url} ({in_short(error)}); start one with 'minillm serve', or "
            "correct the address."
        ) from error
    try:
        return response.status, json.loads(text), header
    except ValueError:
        return response.status, None, header


async def find_target(
    client: "aiohttp.ClientSession", url: str, headers: Mapping[str, str], name: str | None
) -> Target:
    """The model that `name` selects among those that the server lists, or the first.

    Raises:
        NodeError: no server answers, it needs a key, or it is of another kind.
        ConfigError: the server has no such model.
    """
    status, data, header = await ask(client, "GET", f"{url}/v1/models", headers)
    if status in (401, 403):
        raise NodeError(f"{url} refuses the request (status {status}); give its key as --api-key.")
    try:
        listed = {str(one["id"]): one for one in data["data"]}
        first = next(iter(listed))
    except (TypeError, LookupError, StopIteration) as error:
        raise NodeError(
            f"{url} is no OpenAI-compatible server: GET /v1/models returned status {status} "
            "without a list of models; correct the address."
        ) from error
    if name is not None and name not in listed:
        raise ConfigError(
            f"The server has no model {name!r}; --served-model-name must be one of "
            f"{', '.join(listed)}.{did_you_mean(name, listed)}"
        )
    model = name or first
    longest = listed[model].get("max_model_len")
    root = str(listed[model].get("root") or model)
    return Target(url, model, root, longest if isinstance(longest, int) else None, header)


async def find_vocabulary(
    client: "aiohttp.ClientSession",
    target: Target,
    headers: Mapping[str, str],
    seed: int,
    vocab_size: int | None = None,
) -> Vocabulary:
    """The words and token ids of prompts: of the server's /tokenize, of --vocab-size, or else
    words whose number of tokens is unknown."""
    if vocab_size is not None:
        return any_ids(vocab_size, seed)
    url = f"{target.url}/tokenize"

    async def tokens(word: str) -> list[int] | None:
        body = {"model": target.model, "prompt": f" {word}", "add_special_tokens": False}
        status, data, _ = await ask(client, "POST", url, headers, body)
        found = data.get("tokens") if status == 200 and isinstance(data, dict) else None
        return found if isinstance(found, list) else None

    first = await tokens(WORDS[0])
    if first is None:
        return Vocabulary(seed=seed)
    rest = await asyncio.gather(*(tokens(word) for word in WORDS[1:]))
    return from_counts([first, *(ids or [] for ids in rest)], seed)


async def check_request(
    client: "aiohttp.ClientSession",
    target: Target,
    headers: Mapping[str, str],
    path: str,
    body: bytes,
) -> None:
    """Send one request before the measurement, so that a request that the server refuses is
    reported at once.

    Raises:
        ConfigError: the server refuses it, with the server's message.
    """
    from minillm.lab.benchmarks.serving.client import Client
    from minillm.lab.benchmarks.serving.reply import Reply

    reply = Reply(0, 0, asyncio.get_running_loop().time())
    await Client(client, target.url, PROBE_SECONDS * 6, headers).send(reply, path, body)
    if reply.error is not None:
        status = f" with status {reply.status}" if reply.status not in (None, 200) else ""
        raise ConfigError(
            f"The server refuses a request of this workload{status}: "
            f"{message_of(reply.error.encode()).rstrip('.')}."
        )
