"""LLM.int8() (Dettmers et al., 2022, arXiv 2208.07339): 8-bit products without the outliers.

    x W^T = o W'^T + s_x s_w (x_8 W_8^T),   o: the entries of x with |x| >= 6, x_8: the others

Rows of weights and of inputs have a scale each, max |.| / 127. A single outlier would take the
precision of all other entries of its row, so outliers are multiplied in 16 bits.

The paper takes whole columns: those with an outlier in any row of the batch. A row's result then
depends on the other rows. Here each row keeps its own outliers, so results are batch-invariant. The
checkpoint format stores only the codes and scales of weights (`rounding.round_symmetric`).
The engine's product is in `outliers.py`.
"""

THRESHOLD = 6.0
