"""The version under which the graph of the whole search is cached."""

import hashlib
import json

import numpy as np
from helpers.translation_networks import plain_network

from zoo.translation.export.freeze import export
from zoo.translation.search import loop_graph
from zoo.translation.search.kv_cache import incremental_model

# (loop.GRAPH_VERSION, digest of the graph below with that version)
RECORDED = (9, "de0dd248670b2235")


def structure(graph):
    """Operators, how they are connected and integer constants; weights are those of the model."""
    constants = {
        name: np.asarray(value.const_value.numpy()).tolist()
        for name, value in graph.initializers.items()
        if value.const_value.numpy().dtype.kind in "iub"
    }
    nodes = []
    for node in graph:
        attributes = {
            name: structure(value.as_graph()) if value.type.name == "GRAPH" else str(value.value)
            for name, value in sorted(node.attributes.items())
            if value.type.name in ("GRAPH", "INT", "INTS", "STRING")
        }
        inputs = [None if value is None else value.name for value in node.inputs]
        nodes.append([node.op_type, inputs, [value.name for value in node.outputs], attributes])
    return [[x.name for x in graph.inputs], nodes, [x.name for x in graph.outputs], constants]


def test_the_version_changes_with_the_graph():
    graph = loop_graph.search(incremental_model(export(plain_network()))).graph
    current = (
        loop_graph.GRAPH_VERSION,
        hashlib.sha256(json.dumps(structure(graph), sort_keys=True).encode()).hexdigest()[:16],
    )
    assert current == RECORDED, (
        "the search is another graph than when RECORDED was written: bump GRAPH_VERSION in zoo/translation/search/loop_graph.py, so that "
        f"cached graphs are made anew, and record {current} here with the new version"
    )
