"""Sets up Python's garbage collector for a process that serves for a long time."""

import gc

THRESHOLDS = 20_000, 20, 50  # a step or a request makes hundreds of small objects, nearly none of which is in a cycle


def settle_garbage_collector() -> None:
    """Exempt all present objects from collection and collect rarely; called once start-up is done.

    Objects of start-up live as long as the process: to visit them in a collection would stop every stream for a while.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
