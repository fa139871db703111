"""Replies of `minillm serve` have the shapes of those of vLLM, but for a list of differences."""

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.clients.shapes import differences

ROOT = Path(__file__).resolve().parents[2]
VLLM = Path(os.environ.get("MINILLM_PEERS", ROOT / ".peers")) / "vllm" / "bin" / "python"
TINY = ROOT / "minillm" / "assets" / "tiny"
OUR_PORT, THEIR_PORT = 18021, 18020
OURS = [sys.executable, "-m", "minillm", "serve", "tiny", "--port", str(OUR_PORT)]
THEIRS = [
    str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY),
    "--served-model-name", "tiny", "--port", str(THEIR_PORT), "--dtype", "float32",
]  # fmt: skip
# Known differences, as patterns of the lines that `differences` gives.
KNOWN = (
    r"models: only ours\.data\[\]\.chat \(bool\)",  # whether there is a chat template
    r"models: only theirs\.data\[\]\.permission\[\].*",
    r".*only ours.*\.usage\.queue_time_ms \(number\)",
    r".*only (ours|theirs).*\.usage\.prompt_tokens_details.*",  # vLLM: behind an option
    r".*only theirs.*\.usage\.completion_tokens_details \(null\)",
    # fields that vLLM's replies have as null
    r".*only theirs.*\.(prompt_logprobs|prompt_token_ids|token_ids|routed_experts"
    r"|ec_transfer_params|kv_transfer_params|metrics|service_tier) \(null\)",
    r"echo: only theirs\.choices\[\]\.prompt_logprobs\[\] \(null\)",
    r"(too long|no model): only (ours|theirs)\.error\.code .*",  # ours is OpenAI's text
)


@contextmanager
def running(command: list[str], port: int) -> Iterator[str]:
    """A server that answers, at its address."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            for _ in range(600):
                assert server.poll() is None, f"{command} ended with {server.returncode}"
                with suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"{address}/health", timeout=5).close()
                    break
                time.sleep(0.5)
            else:
                raise AssertionError(f"{address} did not answer")
            yield address
        finally:
            server.terminate()


@pytest.mark.skipif(not VLLM.exists(), reason="make peers installs vLLM")
def test_shapes_are_those_of_vllm() -> None:
    with running(OURS, OUR_PORT) as ours, running(THEIRS, THEIR_PORT) as theirs:
        found = differences(ours, theirs)
    print("\n".join(found))
    unknown = [each for each in found if not any(re.fullmatch(known, each) for known in KNOWN)]
    assert unknown == []
    unused = [known for known in KNOWN if not any(re.fullmatch(known, each) for each in found)]
    assert unused == []
