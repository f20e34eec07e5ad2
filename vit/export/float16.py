"""float16 conversion of an ONNX graph; operators that need range or precision stay in float32."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vit.errors import ConfigError, VitError, error_text
from vit.export.onnx_tracing import MAX_GRAPH_BYTES, attribute, inner_nodes, libraries
from vit.exported.exported_classifier import DISTANCE

FLOAT32_OPERATORS = (
    *("LayerNormalization", "RMSNormalization", "Softmax"),
    # in decomposed norms, token merging and MoE capacities
    *("ReduceMean", "ReduceSum", "ReduceL2", "ReduceMax", "Pow", "Sqrt", "Reciprocal", "Log"),
    # positions: angles of rotary embedding grow with the image
    *("Sin", "Cos", "Range", "Resize", "CumSum"),
    # routing of tokens, which must not depend on the last bits
    *("TopK", "ArgMax", "Less", "Greater", "Equal", "ScatterElements", "ScatterND", "OneHot"),
)
LARGEST = float(np.finfo(np.float16).max)


def convert_to_float16(proto: Any, *, units: bool = False) -> Any:
    """Convert a float32 graph to float16; inputs and outputs keep their types.

    The distance from the training images stays in float32: it is a difference of large numbers; so
    do numbers in `units`, such as a year.
    """
    from onnxruntime.transformers import float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    apart = distance_nodes(proto)
    check_range(proto, apart)
    names = [node.name for node in proto.graph.node]
    kinds = [node.op_type for node in proto.graph.node]
    products = [place for place, kind in enumerate(kinds) if kind in ("MatMul", "Gemm")]
    blocked = [*float16.DEFAULT_OP_BLOCK_LIST, *FLOAT32_OPERATORS]
    with warnings.catch_warnings():  # of weights that are too small and become 0
        warnings.simplefilter("ignore")
        try:
            half = float16.convert_float_to_float16(
                proto,
                keep_io_types=True,
                op_block_list=blocked,
                node_block_list=[
                    *names[: products[0]],  # the normalisation of pixels
                    *(node.name for node in apart),
                    *(names[products[-1] + 1 :] if units else ()),
                ],
            )
            tidy_casts(half)
            OnnxModel(half).topological_sort()  # casts that it adds come last
        except Exception as error:  # the library has no common class of its errors
            raise VitError(
                f"precision='fp16': the network cannot be converted ({error_text(error)}); choose "
                "fp32"
            ) from error
    del half.graph.value_info[:]
    return half


def check_range(proto: Any, apart: Sequence[Any]) -> None:
    """Raise if the weights are too many for the converter, or one outside `apart`, the nodes that
    stay in float32, is too large for float16."""
    onnx = libraries()
    floats = [x for x in proto.graph.initializer if x.data_type == onnx.TensorProto.FLOAT]
    size = sum(len(x.raw_data) for x in floats)
    if size > MAX_GRAPH_BYTES:
        raise ConfigError(
            f"precision='fp16': the network has {size / 1e9:.2f} GB of weights, and less than "
            f"{MAX_GRAPH_BYTES / 1e9:.2f} can be converted; choose fp32"
        )
    own = {name for node in apart for name in node.output}
    others = (node for node in proto.graph.node if not own & {*node.output})
    read = {name for node in others for name in node.input}
    for tensor in floats:
        if tensor.name not in read:
            continue
        largest = float(np.abs(onnx.numpy_helper.to_array(tensor)).max(initial=0.0))
        if largest > LARGEST:
            raise VitError(
                f"precision='fp16': {tensor.name} has the weight {largest:g}, and "
                f"float16 ends at {LARGEST:g}; choose fp32"
            )


def tidy_casts(proto: Any) -> None:
    """Remove casts of the converter: copies of a name, and between operators in float32.

    It rounds what one operator in float32 gives to another to float16, where values end at LARGEST.
    """
    half = libraries().TensorProto.FLOAT16
    once = {tuple(node.output): node for node in reversed(proto.graph.node)}
    kept = [node for node in proto.graph.node if once[tuple(node.output)] is node]
    rounded = {
        node.output[0]: node.input[0]
        for node in kept
        if node.op_type == "Cast" and attribute(node, "to") == half
    }
    for node in kept:
        if node.op_type == "Cast" and attribute(node, "to") != half:
            node.input[0] = rounded.get(node.input[0], node.input[0])
    read = {name for node in kept for each in (node, *inner_nodes(node)) for name in each.input}
    del proto.graph.node[:]
    proto.graph.node.extend(node for node in kept if not rounded.keys() & {*node.output} - read)


def distance_nodes(proto: Any) -> list[Any]:
    """Nodes that the distance from the training images is computed by, and no other output."""
    producers = {name: node for node in proto.graph.node for name in node.output}

    def ancestors(names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        waiting = [*names]
        while waiting:
            name = waiting.pop()
            if name in producers and name not in found:
                found |= {*producers[name].output}
                waiting += producers[name].input
        return found

    outputs = [output.name for output in proto.graph.output]
    shared = ancestors(name for name in outputs if name != DISTANCE)
    own = ancestors([DISTANCE]) - shared
    return [node for node in proto.graph.node if own & {*node.output}]
