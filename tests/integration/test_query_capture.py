"""Queries are kept where a graph can find them, in observed steps only."""

from types import SimpleNamespace

import pytest
import torch

from vtoken.integration.vllm.query_capture import QueryCapture

SHAPE = (8, 2, 4)


def make_capture(is_capturing=lambda: False):
    """A capture of layers a and b."""
    return QueryCapture(["a", "b"], SHAPE, torch.bfloat16, torch.device("cpu"), is_capturing)


def test_observed_steps_keep_the_queries_of_sampled_layers():
    """Each layer has its own buffer; others are ignored; the address stays."""
    capture = make_capture()
    address = capture.queries["b"].data_ptr()
    capture.wanted = True
    query = torch.randn(3, 2, 4).to(torch.bfloat16)
    for name in ("b", "unsampled"):
        capture.take(name, query)
    assert torch.equal(capture.queries["b"][:3], query)
    assert (capture.queries["b"][3:] == 0).all()
    assert (capture.queries["a"] == 0).all()
    assert capture.queries["b"].data_ptr() == address


@pytest.mark.parametrize(("capturing", "kept"), [(False, False), (True, True)])
def test_other_steps_copy_only_into_a_graph(capturing, kept):
    """A captured graph also serves observed steps, so it always copies."""
    capture = make_capture(lambda: capturing)
    capture.take("a", torch.ones(1, 2, 4, dtype=torch.bfloat16))
    assert bool((capture.queries["a"][0] == 1).all()) == kept


def test_attach_reaches_sampled_layers_only():
    """Other layers pay nothing."""
    layers = {name: SimpleNamespace(impl=SimpleNamespace(query_sink=None)) for name in "abc"}
    capture = make_capture()
    capture.attach(layers)
    assert [layers[name].impl.query_sink for name in "abc"] == [capture, capture, None]
