"""The layer as an ONNX graph, in each form a runtime might run fastest.

Weights arrive as `nn.Linear` holds them (out, in), as NumPy arrays; the graph stores them transposed and packed, so
that one product makes q, k and v. No torch here: the children that run these graphs must not start its threads.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FORMS = ("MatMul/Softmax", "ONNX Attention", "ORT MultiHeadAttention")


def layer_graph(form, weights, *, batch, length, heads, causal):
    """Self-attention (batch, length, E) -> (batch, length, E) as a serialised model.

    `weights`: w_q w_k w_v w_o (E, E) and b_q b_k b_v b_o (E,), float32, as many key/value heads as heads.
    """
    width = weights["w_q"].shape[1]
    graph = _Graph()
    packed = graph.constant("w_qkv", np.concatenate([weights[f"w_{n}"] for n in "qkv"]).T)
    bias = graph.constant("b_qkv", np.concatenate([weights[f"b_{n}"] for n in "qkv"]))
    qkv = graph.add("Add", graph.add("MatMul", "x", packed), bias)
    q, k, v = graph.add("Split", qkv, outputs=3, axis=-1, num_outputs=3)
    merged = _ATTENTION[form](graph, q, k, v, (batch, length, heads, width // heads), causal)
    w_o, b_o = graph.constant("w_o", weights["w_o"].T), graph.constant("b_o", weights["b_o"])
    graph.add("Add", graph.add("MatMul", merged, w_o), b_o, name="y")
    return graph.serialise((batch, length, width))


def _plain(graph, q, k, v, sizes, causal):
    """Steps 2 to 6 as primitive operations: what an exporter writes, for the runtime to fuse."""
    B, N, H, D = sizes
    split, merge = graph.constant("split", np.array([B, N, H, D])), graph.constant("merge", np.array([B, N, H * D]))
    scale = graph.constant("scale", np.float32(D**-0.5))
    q, k, v = (graph.add("Reshape", t, split) for t in (q, k, v))
    q, v = (graph.add("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, v))
    scores = graph.add("MatMul", graph.add("Mul", q, scale), graph.add("Transpose", k, perm=[0, 2, 3, 1]))
    if causal:
        hidden = np.triu(np.full((N, N), -np.inf, np.float32), 1)
        scores = graph.add("Add", scores, graph.constant("hidden", hidden))
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), v)
    return graph.add("Reshape", graph.add("Transpose", mixed, perm=[0, 2, 1, 3]), merge)


def _attention(graph, q, k, v, sizes, causal):
    heads = sizes[2]
    return graph.add("Attention", q, k, v, q_num_heads=heads, kv_num_heads=heads, is_causal=int(causal))


def _ort_attention(graph, q, k, v, sizes, causal):
    return graph.add(
        "MultiHeadAttention", q, k, v, domain="com.microsoft", num_heads=sizes[2], unidirectional=int(causal)
    )


_ATTENTION = dict(zip(FORMS, (_plain, _attention, _ort_attention)))


class _Graph:
    """Nodes and constants in the order they are added."""

    def __init__(self):
        self.nodes, self.constants = [], []

    def constant(self, name, value):
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def add(self, op, *inputs, outputs=1, name=None, **attributes):
        stem = name or f"{op}_{len(self.nodes)}"
        names = [stem] if outputs == 1 else [f"{stem}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def serialise(self, shape):
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
        graph = helper.make_graph(self.nodes, "layer", [x], [y], self.constants)
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        onnx.checker.check_model(model)
        return model.SerializeToString()
