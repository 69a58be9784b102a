"""Graphs of ONNX, written as arithmetic of their values."""

from typing import Any

import numpy as np

from rfa.checks import needs

OPSET = 18
IR_VERSION = 8  # runtimes from 2022 on read both


class Value:
    """A tensor of a graph. Operators add nodes to the graph; numbers beside it become constants in float64."""

    def __init__(self, graph: "Graph", name: str):
        self.graph, self.name = graph, name

    def __add__(self, other: Any) -> "Value":
        return self.graph.add("Add", self, other)

    def __sub__(self, other: Any) -> "Value":
        return self.graph.add("Sub", self, other)

    def __mul__(self, other: Any) -> "Value":
        return self.graph.add("Mul", self, other)

    def __truediv__(self, other: Any) -> "Value":
        return self.graph.add("Div", self, other)

    def __matmul__(self, other: Any) -> "Value":
        return self.graph.add("MatMul", self, other)

    def __neg__(self) -> "Value":
        return self.graph.add("Neg", self)

    def __lt__(self, other: Any) -> "Value":
        return self.graph.add("Less", self, other)

    def __gt__(self, other: Any) -> "Value":
        return self.graph.add("Greater", self, other)

    def __and__(self, other: "Value") -> "Value":
        return self.graph.add("And", self, other)

    def __or__(self, other: "Value") -> "Value":
        return self.graph.add("Or", self, other)

    def __invert__(self) -> "Value":
        return self.graph.add("Not", self)

    def __getitem__(self, index: "int | Value") -> "Value":
        """Along the first dimension."""
        return self.graph.add("Gather", self, index if isinstance(index, Value) else np.array(index))

    @property
    def mT(self) -> "Value":
        """Each of several matrices transposed, `(c, n, m)`."""
        return self.graph.add("Transpose", self, perm=[0, 2, 1])

    def apply(self, kind: str) -> "Value":
        """An operator of this value alone, such as "Sqrt"."""
        return self.graph.add(kind, self)

    def cast(self, kind: str) -> "Value":
        """In another type, such as "INT64"."""
        import onnx

        return self.graph.add("Cast", self, to=getattr(onnx.TensorProto, kind))

    def isnan(self) -> "Value":
        """Where it is NaN."""
        return self.apply("IsNaN")

    def widened(self, *axes: int) -> "Value":
        """With further dimensions of 1."""
        return self.graph.add("Unsqueeze", self, np.array(axes))

    def reshape(self, *shape: int) -> "Value":
        """The same entries in another shape."""
        return self.graph.add("Reshape", self, np.array(shape))

    def sum(self, axis: int = -1) -> "Value":
        """Along a dimension, which goes."""
        return self.graph.add("ReduceSum", self, np.array([axis]), keepdims=0)

    def clip(self, least: float, most: float) -> "Value":
        """Bounded."""
        return self.graph.add("Clip", self, least, most)

    def where(self, condition: "Value", other: Any) -> "Value":
        """Itself where a condition holds, something else elsewhere."""
        return self.graph.add("Where", condition, self, other)

    def split(self, *sizes: int) -> list["Value"]:
        """Parts along the last dimension."""
        return self.graph.add("Split", self, np.array(sizes), axis=-1, outputs=len(sizes))


class Graph:
    """Nodes in the order in which they are added, with inputs, constants and outputs."""

    def __init__(self) -> None:
        needs("onnx")
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: list[Any] = []

    def input(self, name: str, *shape: int, kind: str = "DOUBLE") -> Value:
        """What is given at each run."""
        self._inputs.append(_described(name, shape, kind))
        return Value(self, name)

    def output(self, name: str, value: Value, *shape: int, kind: str = "DOUBLE") -> None:
        """What each run gives."""
        import onnx

        self._nodes.append(onnx.helper.make_node("Identity", [value.name], [name]))
        self._outputs.append(_described(name, shape, kind))

    def constant(self, value: Any, name: str = "") -> Value:
        """A tensor that stays. Numbers are float64, but in arrays of another kind."""
        import onnx

        array = value if isinstance(value, np.ndarray) else np.array(value, dtype=np.float64)
        name = name or f"constant.{len(self._constants)}"
        self._constants.append(onnx.numpy_helper.from_array(array, name))
        return Value(self, name)

    def add(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """A node: its value, or a list of several."""
        import onnx

        given = [(x if isinstance(x, Value) else self.constant(x)).name for x in inputs]
        names = [f"{kind}.{len(self._nodes)}.{k}" for k in range(outputs)]
        self._nodes.append(onnx.helper.make_node(kind, given, names, **attributes))
        values = [Value(self, name) for name in names]
        return values[0] if outputs == 1 else values

    def model(self, name: str, metadata: dict[str, str]) -> Any:
        """The checked model, a protobuf message."""
        import onnx

        graph = onnx.helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._constants)
        opsets = [onnx.helper.make_opsetid("", OPSET)]
        found = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="rfa")
        onnx.helper.set_model_props(found, metadata)
        onnx.checker.check_model(found)
        return found


def _described(name: str, shape: tuple[int, ...], kind: str) -> Any:
    import onnx

    return onnx.helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), shape)
