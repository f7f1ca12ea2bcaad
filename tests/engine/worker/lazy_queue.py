"""LazyQueue: a DeviceQueue in host memory that does nothing before it must.

Copies and replays wait in line until a mark is waited for (or work runs that cannot be replayed), so what the host
overwrites too early arrives wrong, as it would on a GPU that is behind.
"""

from collections import deque

import torch


class LazyMark:
    def __init__(self, queue, place):
        self.queue, self.place = queue, place

    def wait(self):
        self.queue.catch_up(self.place)

    def done(self):
        return self.queue.num_done >= self.place


class LazyQueue:
    device = torch.device("cpu")

    def __init__(self, fail_capture_at=None, free=1000):
        self.waiting = deque()
        self.num_queued = self.num_done = 0
        self.captured = []  # recorded work, in order
        self.replays = 0
        self.fail_capture_at = fail_capture_at
        self.free = free

    def catch_up(self, place=None):
        while self.waiting and (place is None or self.num_done < place):
            self.waiting.popleft()()
            self.num_done += 1

    def add(self, work):
        self.waiting.append(work)
        self.num_queued += 1

    def host_bytes(self, num_bytes):
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target, source):
        self.add(lambda: target.copy_(source))

    def run(self, work):
        self.catch_up()
        return work()

    def copy_queue(self):
        return LazyQueue()

    def after(self, mark):
        self.add(mark.wait)

    def mark(self):
        return LazyMark(self, self.num_queued)

    def capture(self, work):
        if len(self.captured) == self.fail_capture_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured.append(work)
        self.free -= 100 if len(self.captured) == 1 else 7

        def replay():
            self.replays += 1
            self.add(work)

        return replay

    def free_bytes(self):
        self.catch_up()
        return self.free
