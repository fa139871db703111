"""vLLM's constructor arguments that have no effect here; accepted so that scripts run unchanged."""

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minillm.api.sampling_params import shown
from minillm.errors import UnsupportedFeatureError

# Arguments that vLLM has or had and that have no effect here, with the accepted values.
WITHOUT_MEANING: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "use_v2_block_manager": (True, False),
        "disable_log_requests": (True, False),
        "enable_log_requests": (True, False),
        "trust_remote_code": (False,),
    }
)
# vLLM's arguments that accept only their default here: the default, and the reason.
ONLY_DEFAULT: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "tokenizer_mode": ("auto", "there is one tokenizer, that of tokenizer.json"),
        "skip_tokenizer_init": (False, "a model's tokenizer is always loaded, if it has one"),
        "revision": (None, "give the folder of that revision as model"),
        "download_dir": (None, "set the environment variable HF_HUB_CACHE instead"),
    }
)


def without_meaningless(arguments: dict[str, Any]) -> dict[str, Any]:
    """Drop vLLM's arguments that have no effect here; an ignored argument gives a warning.

    Raises:
        UnsupportedFeatureError: a value other than those accepted.
    """
    for name, (default, reason) in ONLY_DEFAULT.items():
        value = arguments.pop(name, default)
        if value is not default and value != default:
            raise UnsupportedFeatureError(f"{name}={shown(value)} is not supported: {reason}.")
    for name, harmless in WITHOUT_MEANING.items():
        if name in arguments:
            value = arguments.pop(name)
            if value not in harmless:
                allowed = " or ".join(map(str, harmless))
                why = "minillm never runs code of a checkpoint" * (name == "trust_remote_code")
                raise UnsupportedFeatureError(
                    f"{name}={shown(value)} is not supported: {why or f'it may be {allowed}'}."
                )
            warnings.warn(f"{name} has no meaning in minillm and is ignored.", stacklevel=3)
    return arguments
