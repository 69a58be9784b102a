"""What operations write: a bound of the memory that they take, in numbers, that short inputs tell already."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Written(TorchDispatchMode):
    """Numbers in the results of all operations of PyTorch, backward too; what a kernel takes inside is not seen."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.total += sum(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x))
        return out
