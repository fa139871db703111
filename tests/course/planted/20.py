"""Every plan takes all sequences that decode, so that no other plan has any."""

from minillm.scheduling import scheduler

scheduler.most_decoding = lambda num_running, config: num_running
