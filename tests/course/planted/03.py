"""Every step after the first rotates queries and keys one position too far; the slots are right."""

from dataclasses import replace

from minillm.models.forward_pass import ForwardPass


def shifted(batch):
    def shifted_batch(self, chunks, block_size):
        made = batch(self, chunks, block_size)
        return replace(made, positions=made.positions + int(chunks[0].start > 0))

    return shifted_batch


ForwardPass.batch = shifted(ForwardPass.batch)
