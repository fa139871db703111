"""Admission reserve_max sets aside what a request has, not what it may write."""

from minillm.scheduling.admission import Admission
from minillm.scheduling.policies import watermark

Admission.target = lambda self, sequence: watermark(sequence, self.blocks.block_size)
