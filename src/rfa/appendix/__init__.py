"""Dense operators of the paper's appendices that no preset uses, one file each."""

from .coupled import CoupledFilterAttention
from .tensor import TensorFilterAttention, tensor_filter_attention

__all__ = ["CoupledFilterAttention", "TensorFilterAttention", "tensor_filter_attention"]
