"""The models and batches of these tests are shared by the test files of this folder."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def known_shapes():
    return {}


@pytest.fixture(autouse=True)
def shapes_of_a_model_are_found_once(monkeypatch, known_shapes):
    """Tracing a model for its parameters' shapes is most of what loading a tiny one takes, and tests load few kinds."""
    from jaxformer.interop import load

    find = load.abstract_params

    def abstract_params(model, chosen):
        key = (str(model.config), chosen.task, chosen.is_body)
        if key not in known_shapes:
            known_shapes[key] = find(model, chosen)
        return known_shapes[key]

    monkeypatch.setattr(load, "abstract_params", abstract_params)
