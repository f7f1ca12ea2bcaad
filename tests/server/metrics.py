"""Reads metrics from /metrics."""

from prometheus_client.parser import text_string_to_metric_families


def families(client) -> dict:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(client, family: str, **labels) -> float:
    samples = families(client)[family].samples
    return sum(s.value for s in samples if labels.items() <= s.labels.items() and not s.name.endswith("_bucket"))
