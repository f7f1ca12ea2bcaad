"""Decides what the next step computes: order, admission, preemption, fairness between tenants."""
