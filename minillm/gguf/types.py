"""The tensor types of GGUF: a row is a sequence of blocks, each of the same number of weights."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    """A tensor type: its name, the weights of a block, and the bytes of a block."""

    name: str
    weights: int
    bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether each weight is a floating-point number."""
        return self.weights == 1


TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
# Types of other engines' files, for the error message. 4, 5 and 31 to 38 were removed from GGUF.
UNSUPPORTED: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
