"""Training recipes of the embedded models."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minillm.config import ModelConfig, RopeConfig

VOCAB_SIZE = 4096


@dataclass(frozen=True)
class Phase:
    """A phase of training with one mix of text.

    `stdlib_rows` of every 16 rows come from the standard library, the rest from packages. Steps
    cycle through the row lengths of `windows`: mostly short rows, which are cheap, and some long
    ones, so that the model is trained on every position.
    """

    steps: int
    stdlib_rows: int
    windows: tuple[int, ...] = (512,)


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters, which determine the weights together with the corpus.

    A step has `batch_tokens`, processed in micro-batches of `micro_tokens`. Matrices are trained by
    Muon (Jordan et al., 2024), embeddings and norms by AdamW (Loshchilov and Hutter, 2019). The
    learning rate warms up, stays constant, and decays linearly to zero over the last `decay_steps`.
    With a `teacher`, the model is distilled: it learns the teacher's output distribution over the
    standard library and, instead of packages, over `own_batches` of 49,152 tokens of prompts with
    the teacher's greedy continuations.
    """

    name: str
    config: ModelConfig
    phases: tuple[Phase, ...]
    decay_steps: int
    batch_tokens: int = 8192
    micro_tokens: int = 2048
    matrix_lr: float = 6e-3
    embedding_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 60
    seed: int = 0
    teacher: str | None = None
    own_batches: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> tuple[Phase, int]:
        """The phase that `step` (from 0) belongs to, and the number of steps before it."""
        start = 0
        for phase in self.phases[:-1]:
            if step < start + phase.steps:
                return phase, start
            start += phase.steps
        return self.phases[-1], start

    def window_at(self, step: int) -> int:
        """Row length in tokens of `step`."""
        phase, start = self.phase_at(step)
        return phase.windows[(step - start) % len(phase.windows)]

    def lr_factor(self, step: int) -> float:
        """The learning rate at `step`, as a fraction of the peak."""
        warmup = (step + 1) / self.warmup_steps
        return min(1.0, warmup, (self.steps - step) / self.decay_steps)


def _qwen3(
    width: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int
) -> ModelConfig:
    """Qwen3's architecture, whose q/k norms allow high learning rates."""
    return ModelConfig(
        family="qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        max_position_embeddings=2048,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=True,
        qk_norm=True,
    )


_TINY = Recipe(
    "tiny",
    _qwen3(width=256, layers=7, heads=4, kv_heads=2, head_dim=64, mlp=768),
    phases=(Phase(1300, 6), Phase(1700, 10, windows=(512, 512, 512, 512, 512, 2048))),
    decay_steps=1700,
)
_DRAFT = Recipe(
    "tiny-draft",
    _qwen3(width=128, layers=3, heads=2, kv_heads=1, head_dim=64, mlp=256),
    phases=(Phase(1000, 8), Phase(1400, 5)),
    decay_steps=2000,
    matrix_lr=8e-3,
    embedding_lr=4e-3,
    teacher="tiny",
    own_batches=40,
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({each.name: each for each in (_TINY, _DRAFT)})
