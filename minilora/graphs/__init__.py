"""How a step is frozen and replayed. Knows no model: a function and fixed tensors are enough."""

from minilora.graphs.base import Captured, CaptureError, Graph, GraphBackend
from minilora.graphs.cuda import CudaBackend, CudaGraph
from minilora.graphs.dispatch_table import dispatch_table
from minilora.graphs.dispatcher import GraphDispatcher, GraphKey
from minilora.graphs.piecewise import PiecewiseGraph, capture_piecewise, outside_graph
from minilora.graphs.recorded import RecordedBackend, RecordedGraph

__all__ = [
    "CaptureError",
    "Captured",
    "CudaBackend",
    "CudaGraph",
    "Graph",
    "GraphBackend",
    "GraphDispatcher",
    "GraphKey",
    "PiecewiseGraph",
    "RecordedBackend",
    "RecordedGraph",
    "capture_piecewise",
    "dispatch_table",
    "outside_graph",
]
