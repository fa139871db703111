"""NF4 has eight levels below 0 and seven above: the table is mirrored."""

from minillm.quantization import nf4

right = nf4.nf4_levels
nf4.nf4_levels = lambda: -right().flip(0)
