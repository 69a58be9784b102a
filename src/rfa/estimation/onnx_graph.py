"""Graphs of ONNX, written as arithmetic of their values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

OPSET = 18
IR_VERSION = 8  # runtimes from 2022 on read both


def _operator(kind: str) -> Callable[["Value", Any], "Value"]:
    """A method that adds a node of two values to their graph."""
    return lambda one, other: one.graph.add(kind, one, other)


class Value:
    """A tensor of a graph. Operators add nodes to the graph; numbers beside it become constants in float64."""

    def __init__(self, graph: "Graph", name: str):
        self.graph, self.name = graph, name

    __add__, __sub__, __mul__, __truediv__ = map(_operator, ("Add", "Sub", "Mul", "Div"))
    __matmul__, __lt__, __gt__, __and__, __or__ = map(_operator, ("MatMul", "Less", "Greater", "And", "Or"))

    def __neg__(self) -> "Value":
        return self("Neg")

    def __invert__(self) -> "Value":
        return self("Not")

    def __getitem__(self, index: "int | Value") -> "Value":
        """Along the first dimension."""
        return self("Gather", index if isinstance(index, Value) else np.array(index))

    def __call__(self, kind: str, *others: Any, **attributes: Any) -> Any:
        """An operator of this value and others by its name, such as "Sqrt"."""
        return self.graph.add(kind, self, *others, **attributes)

    @property
    def mT(self) -> "Value":
        """Each of several matrices transposed, `(c, n, m)`."""
        return self("Transpose", perm=[0, 2, 1])

    def widened(self, *axes: int) -> "Value":
        """With further dimensions of 1."""
        return self("Unsqueeze", np.array(axes))

    def reshape(self, *shape: int) -> "Value":
        """The same entries in another shape."""
        return self("Reshape", np.array(shape, dtype=np.int64))

    def sum(self, axis: int = -1) -> "Value":
        """Along a dimension, which goes."""
        return self("ReduceSum", np.array([axis]), keepdims=0)

    def where(self, condition: "Value", other: Any) -> "Value":
        """Itself where a condition holds, something else elsewhere."""
        return self.graph.add("Where", condition, self, other)

    def split(self, *sizes: int) -> list["Value"]:
        """Parts along the last dimension."""
        return self("Split", np.array(sizes), axis=-1, outputs=len(sizes))


class Graph:
    """Nodes in the order in which they are added, with inputs, constants and outputs."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: list[Any] = []

    def input(self, name: str, *shape: int, kind: str = "DOUBLE") -> Value:
        """What is given at each run."""
        self._inputs.append(_value_info(name, shape, kind))
        return Value(self, name)

    def output(self, name: str, value: Value, *shape: int, kind: str = "DOUBLE") -> None:
        """What each run gives."""
        self._nodes.append(helper.make_node("Identity", [value.name], [name]))
        self._outputs.append(_value_info(name, shape, kind))

    def constant(self, value: Any, name: str = "") -> Value:
        """A tensor that stays. Numbers are float64, but in arrays of another kind."""
        array = value if isinstance(value, np.ndarray) else np.array(value, dtype=np.float64)
        name = name or f"constant.{len(self._constants)}"
        self._constants.append(onnx.numpy_helper.from_array(array, name))
        return Value(self, name)

    def add(self, kind: str, *inputs: Any, outputs: int | None = None, **attributes: Any) -> Any:
        """A node: its value, or a list of so many."""
        given = [(x if isinstance(x, Value) else self.constant(x)).name for x in inputs]
        names = [f"{kind}.{len(self._nodes)}.{k}" for k in range(outputs or 1)]
        self._nodes.append(helper.make_node(kind, given, names, **attributes))
        values = [Value(self, name) for name in names]
        return values if outputs else values[0]

    def model(self, name: str, metadata: dict[str, str]) -> Any:
        """The checked model, a protobuf message."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._constants)
        opsets = [helper.make_opsetid("", OPSET)]
        found = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="rfa")
        helper.set_model_props(found, metadata)
        onnx.checker.check_model(found)
        return found


def _value_info(name: str, shape: tuple[int, ...], kind: str) -> Any:
    return helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape)
