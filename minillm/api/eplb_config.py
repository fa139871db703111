"""`eplb_config`: settings of expert-parallel load balancing (EPLB)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral

from minillm.api.sampling_params import shown
from minillm.errors import ConfigError, UnknownArgumentError, did_you_mean


@dataclass(frozen=True)
class EplbConfig:
    """Expert load balancing; names, meanings and defaults are vLLM's.

    Attributes:
        window_size: number of latest steps over which expert load is measured. Each rank keeps 4
            bytes per step, expert and layer.
        step_interval: steps between two placements.
        num_redundant_experts: slots for copies of popular experts, over all ranks of a stage; the
            number of slots in all must be a multiple of the ranks.

    Raises:
        ConfigError: a value out of its range.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), int(each.name != "num_redundant_experts")
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole or not least <= value < 2**31:
                raise ConfigError(
                    f"{each.name} of eplb_config is {shown(value)}; it must be a whole number of "
                    f"at least {least}."
                )
            object.__setattr__(self, each.name, int(value))

    @classmethod
    def of(cls, given: object) -> "EplbConfig":
        """The config for a mapping of names to values."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"eplb_config is {shown(given)}; it must be a dictionary such as "
                "{'step_interval': 3000, 'num_redundant_experts': 2}."
            )
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownArgumentError(
                    f"eplb_config has no key {shown(name)}; it has "
                    f"{', '.join(map(repr, known))}.{did_you_mean(str(name), known)}"
                )
        return cls(**given)
