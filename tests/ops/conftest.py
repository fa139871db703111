"""What the tests of C share."""

from itertools import product

import pytest
import torch

from minillm.models.decoder import Decoder
from minillm.ops import cpu
from tests.ops.c_variants import PATHS, parameters
from tests.ops.small_decoders import BF16, CONFIGS, F32, build


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are in panels on every processor that has C functions."""
    if cpu.functions(F32) is None:
        pytest.skip(cpu.describe(F32))
    monkeypatch.setenv(cpu.PANELS, "1")


@pytest.fixture(params=[BF16, F32], ids=["bf16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """A type that has C functions here."""
    if cpu.functions(request.param) is None:
        pytest.skip(cpu.describe(request.param))
    return request.param


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, dtype: torch.dtype) -> Decoder:
    """Each of the small decoders."""
    return build(CONFIGS[request.param], dtype=dtype)


@pytest.fixture(scope="module", params=parameters(*product(PATHS)))
def path(request: pytest.FixtureRequest) -> str:
    """What the library is compiled for."""
    return request.param
