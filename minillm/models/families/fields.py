"""Reads the fields of a Hugging Face ``config.json`` that families share.

Missing fields have the defaults of transformers. An unsupported value raises an error that names
the field; no field that affects the output is ignored.
"""

import sys
from collections.abc import Mapping
from typing import Any

from minillm.api.sampling_params import shown
from minillm.config import DTYPE_BYTES, ModelConfig, RopeConfig
from minillm.errors import ConfigError, UnsupportedFeatureError

Fields = Mapping[str, Any]
LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_NUMBERS = (
    *("low_freq_factor", "high_freq_factor"),  # llama3
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),  # yarn
)
LARGEST = 1 << 24  # limit of integer fields; larger positions are not exact in float32
MAX_LAYERS, MAX_EXPERTS = 1024, 4096  # modules are created before the weights are checked
LIMITS: Mapping[str, int] = {
    "num_hidden_layers": MAX_LAYERS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), MAX_EXPERTS),
}


def only(data: Fields, name: str, supported: Any) -> None:
    """Raise an error if a field is present with another value than the supported one."""
    if data.get(name, supported) != supported:
        raise UnsupportedFeatureError(
            f"config.json says {name} = {data[name]!r}; this version has only {supported!r}."
        )


def integer(data: Fields, name: str, default: int | None = None) -> int:
    """An integer field. null means the default; without a default the field is required."""
    value = data.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json has no {name!r}, which this model family needs.")
    most = LIMITS.get(name, LARGEST)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > most:
        raise ConfigError(
            f"config.json says {name} = {shown(value)}; it must be a whole number up to {most}."
        )
    return value


def flag(data: Fields, name: str, default: bool = False) -> bool:
    """A boolean field; null means the default."""
    value = data.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"config.json says {name} = {value!r}; it must be true or false.")
    return value


def section(data: Fields, name: str) -> Fields:
    """An object field; missing or null means empty."""
    value = data.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json says {name} = {value!r}; it must be a JSON object.")
    return value


def numbers(data: Fields, name: str) -> tuple[Any, ...]:
    """A field with a list of numbers; missing or null means empty."""
    value = data.get(name)
    value = [] if value is None else value
    if not isinstance(value, list | tuple) or not all(map(is_number, value)):
        raise ConfigError(f"config.json says {name} = {value!r}; it must be a list of numbers.")
    return tuple(value)


def number(data: Fields, name: str, default: float) -> float:
    """A number field; null means the default."""
    value = data.get(name)
    value = default if value is None else value
    if not is_number(value):
        raise ConfigError(f"config.json says {name} = {shown(value)}; it must be a finite number.")
    return float(value)


def is_number(value: object) -> bool:
    """Whether a value is a finite number that fits in a float. Python's JSON parser accepts NaN,
    Infinity and integers of any size."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def dtype_name(data: Fields) -> str:
    """The checkpoint's dtype, from ``dtype`` or ``torch_dtype``; float32 if both are missing."""
    name = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedFeatureError(
            f"config.json says dtype {name!r}; this version has {', '.join(DTYPE_BYTES)}."
        )
    return name


def rope_config(data: Fields, theta: float = 10000.0, interleaved: bool = False) -> RopeConfig:
    """RoPE from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    fields: dict[str, Any] = {
        "rope_theta": data.get("rope_theta"),
        "original_max_position_embeddings": data.get("original_max_position_embeddings"),
        **section(data, "rope_scaling"),
        **section(data, "rope_parameters"),
    }
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise UnsupportedFeatureError("RoPE differs between layer types; this version has one.")
    rope_type: Any = fields.get("rope_type") or fields.get("type") or "default"
    rope_type = "longrope" if rope_type == "su" else rope_type  # the old name, in Phi-3
    if number(fields, "partial_rotary_factor", number(data, "partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedFeatureError("partial_rotary_factor is not 1; this version rotates all.")
    length = integer(data, "max_position_embeddings")
    given = fields["original_max_position_embeddings"] is not None
    original = integer(fields, "original_max_position_embeddings") if given else None
    # yarn and longrope: the default factor is the ratio of the two lengths.
    ratio = length / original if rope_type in ("yarn", "longrope") and original else 1.0
    needed = {"linear": ("factor",), "dynamic": ("factor",), "llama3": LLAMA3_FIELDS}
    for name in needed.get(str(rope_type), ()):
        if fields.get(name) is None:
            raise ConfigError(f"config.json gives no {name!r}, which {rope_type} RoPE needs.")
    return RopeConfig(
        theta=number(fields, "rope_theta", theta),
        rope_type=rope_type,
        factor=number(fields, "factor", ratio),
        original_max_position_embeddings=original,
        truncate=flag(fields, "truncate", True),
        short_factor=numbers(fields, "short_factor"),
        long_factor=numbers(fields, "long_factor"),
        interleaved=interleaved,
        **{name: number(fields, name, 0) for name in ROPE_NUMBERS if fields.get(name) is not None},
    )


def common(data: Fields, family: str, kv_heads: int | None = None, **overrides: Any) -> ModelConfig:
    """Fields shared by all families; `overrides` are specific to a family.

    `kv_heads` is the default of a missing ``num_key_value_heads``. If it is None, or the field is
    null, there is one KV head per query head.
    """
    heads = integer(data, "num_attention_heads")
    absent = "num_key_value_heads" not in data
    hidden_size = integer(data, "hidden_size")
    values: dict[str, Any] = {
        "vocab_size": integer(data, "vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": integer(data, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": integer(
            data, "num_key_value_heads", (kv_heads or heads) if absent else heads
        ),
        "head_dim": integer(data, "head_dim", hidden_size // max(heads, 1)),
        "intermediate_size": integer(data, "intermediate_size"),
        "max_position_embeddings": integer(data, "max_position_embeddings"),
        "rms_norm_eps": number(data, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": flag(data, "tie_word_embeddings"),
        "dtype": dtype_name(data),
    }
    if "rope" not in overrides:
        values["rope"] = rope_config(data)
    return ModelConfig(family=family, **(values | overrides))


def window_of(data: Fields, default: int | None) -> int | None:
    """The sliding window; missing means the family's default, null means none."""
    if data.get("sliding_window", default) is None:
        return None
    window = integer(data, "sliding_window", default)
    if window < 1:
        raise ConfigError(f"config.json says sliding_window = {window}; it must be at least 1.")
    return window


def every_layer(data: Fields, window: int | None) -> tuple[int | None, ...]:
    """The same sliding window in all layers."""
    return (window,) * integer(data, "num_hidden_layers") if window else ()
