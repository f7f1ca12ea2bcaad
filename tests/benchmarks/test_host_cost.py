"""benchmarks/host_cost.py runs, and its parts add up."""

import gc

import pytest

from benchmarks.host_cost import DRIVER_STAGES, WORKER_STAGES, figures, measure


def test_parts_add_up_to_the_sum():
    thresholds = gc.get_threshold()
    try:
        table = measure(3, 8, 1, cpu_time=False)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    assert all(table[stage] > 0 for stage in (*DRIVER_STAGES, *WORKER_STAGES))
    assert table["sum"] >= max(table["driver"], table["worker"])


def test_a_stage_that_holds_others_counts_what_they_leave():
    step = {
        "process": 0.011,
        "update": 0.002,
        "pump": 0.005,
        "schedule": 0.002,
        "encode plan": 0.001,
        "launch": 0.01,
        "stage": 0.006,
        "input batch": 0.004,
    }
    table = figures(step)
    assert table["other planning"] == pytest.approx(2)
    assert table["packing"] == pytest.approx(2) and table["other launch"] == pytest.approx(4)
    assert table["deliver"] == pytest.approx(4)  # the next plan is sent within "process"
    assert table["driver"] == pytest.approx(11) and table["worker"] == pytest.approx(10)
