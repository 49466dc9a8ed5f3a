"""Load tests are tested as on a CPU, unless a test says otherwise."""

import pytest


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    monkeypatch.setattr("harness.bench.config.inference_device", lambda: "cpu")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Scripted engines do not go on spinning."""
    monkeypatch.setattr("harness.bench.interleaving.QUIET_S", 0.0)
