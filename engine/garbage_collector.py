"""Sets up Python's garbage collector for a process that serves for a long time."""

import gc

# A step or a request makes hundreds of small objects, nearly none of which is in a cycle. A collection of the youngest
# 2,000 stops the event loop or the step loop for 0.3 ms, one of the second generation visits ten times as many. A full
# one visits all objects, those of a thousand streams for a quarter of a second: server/process/memory.py starts it.
THRESHOLDS = 2_000, 10, 1_000


def settle_garbage_collector() -> None:
    """Exempt all present objects from collection and collect rarely; called once start-up is done.

    Objects of start-up live as long as the process: to visit them in a collection would stop every stream for a while.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def exempt_present_objects() -> None:
    """Exempt what was made since settle_garbage_collector, too, such as the blocks of the KV cache. Takes no time."""
    gc.freeze()


def thaw_garbage() -> None:
    """Let the collector see the objects of start-up again, and free those that nothing uses any more."""
    gc.unfreeze()
    gc.collect()
