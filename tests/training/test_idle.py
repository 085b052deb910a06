"""The time in which a device has nothing to do, and what then limits a run."""

import time

import pytest
import torch

from megabatch.reporting.limits import limit_of, limit_sentence
from megabatch.training.idle import IdleTime, watch_idle


def test_idle_time_adds_up_between_two_looks_and_is_taken_once():
    times, states = iter([0.0, 1.0, 3.0, 7.0, 8.0]), iter([True, False, True, True])
    idle = IdleTime(lambda: next(states), lambda: next(times))
    idle.look()
    idle.look()
    assert idle.take() == 1
    idle.look()
    idle.look()
    assert (idle.take(), idle.take()) == (5, 0)


def test_a_cpu_is_not_watched():
    with watch_idle(torch.device("cpu")) as idle:
        assert idle is None


@pytest.mark.parametrize(
    ("waiting", "idle", "limit"), [(0.3, 0.4, "reading"), (0.02, 0.4, "host"), (0.05, 0.14, "device"), (0.0, 0.0, "device")]
)
def test_one_of_reading_host_and_device_is_the_limit(waiting, idle, limit):
    assert limit_of(waiting, idle) == limit
    assert limit in limit_sentence(waiting, idle).lower()
    # Reading shows without a device that can be watched, the others do not.
    assert (limit_sentence(waiting, None) is not None) == (limit == "reading")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_is_idle_while_the_host_sleeps_and_busy_while_it_computes():
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    with watch_idle(device) as idle:
        time.sleep(0.3)
        assert idle.take() > 0.2
        began = time.perf_counter()
        for _ in range(30):
            matrix @ matrix
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        assert seconds > 0.05
        # One look after the work has ended may count the time since the look before it.
        assert idle.take() < 0.2 * seconds
