"""A module whose numbers stay in full precision when a model is cast down."""

from torch import Tensor, nn


class FullPrecision(nn.Module):
    """Follows a change of device, not one to half precision: phases and variances would be wrong there."""

    def _apply(self, fn, recurse=True):
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype.itemsize >= 4 else tensor.to(moved.device)

        return super()._apply(keep_precision, recurse)
