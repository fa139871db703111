"""From one stage to the next."""

import socket
import threading
from contextlib import ExitStack

import pytest
import torch

from minillm.parallel.communicator import CommunicationError, Traffic
from minillm.parallel.pipes import Pipe, SocketPipe


@pytest.fixture(params=["threads", "sockets"])
def ends(request):
    """The sender's and the receiver's."""
    with ExitStack() as stack:
        if request.param == "threads":
            pipe = Pipe(0.5)
            yield pipe, pipe
            return
        pair = [SocketPipe(each, 0.5) for each in socket.socketpair()]
        for each in pair:
            stack.callback(each.close)
        yield tuple(pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_arrive_in_order_and_as_they_were(ends, dtype):
    """Several ahead of the receiver, also more than a socket holds; and their memory is free."""
    sender, receiver = ends
    sizes = [(1, 8), (3, 8), (700, 512), (0, 8), (5, 64), (2, 8)]
    sent = [torch.randn(size).to(dtype) for size in sizes]
    for each in sent:
        mine = each.clone()
        sender.send(mine)
        mine.zero_()
    for size, each in zip(sizes, sent, strict=True):
        assert torch.equal(receiver.receive(size, dtype), each)
    total = sum(each.nbytes for each in sent)
    assert receiver.traffic == Traffic(len(sizes), total)
    assert sender.traffic == Traffic(len(sizes), total)


def test_a_part_of_a_larger_tensor(ends):
    sender, receiver = ends
    whole = torch.arange(60.0).view(6, 10)
    sender.send(whole[:, 2:5])
    assert torch.equal(receiver.receive((6, 3), torch.float32), whole[:, 2:5])


def test_nothing_comes(ends):
    with pytest.raises(CommunicationError, match=r"in 0.5 seconds"):
        ends[1].receive((1, 4), torch.float32)


def test_a_receiver_that_waits_hears_of_a_failure(ends):
    sender, receiver = ends
    receiver.patience = 60
    timer = threading.Timer(0.2, sender.abort)
    timer.start()
    with pytest.raises(CommunicationError, match=r"stage before"):
        receiver.receive((1, 4), torch.float32)
    timer.join()


def test_a_sender_that_ends_in_the_middle():
    left, right = socket.socketpair()
    receiver = SocketPipe(right, 60)
    left.sendall(b"12345")
    left.close()
    with pytest.raises(CommunicationError, match="has ended"):
        receiver.receive((1, 4), torch.float32)
    receiver.close()
    receiver.close()
