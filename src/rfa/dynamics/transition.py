"""How a state moves in time: rotation and decay, the two factors of exp(Lambda t) with Lambda = -mu + i omega."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def time_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which times and phases are computed: float64 wherever the device has it.

    In float32 a phase `omega t` of 1e6 radians has an error of 0.06. Cosine and sine are therefore taken first, and
    rounded afterwards.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def rotation(
    frequency: Float[Tensor, "heads modes"],
    times: Float[Tensor, "*batch length"] | Int[Tensor, "*batch length"],
) -> tuple[Float[Tensor, "*b heads length modes"], Float[Tensor, "*b heads length modes"]]:
    """Cosine and sine of the phases `omega_k t_i` (section 3.2), each `(..., heads, length, modes)` in `time_dtype`.

    Args:
        frequency: angular frequencies omega, radians per unit of time.
        times: `(length,)` or `(batch, length)`.
    """
    return rotation_of_heads(frequency, times[..., None, :])


def rotation_of_heads(
    frequency: Float[Tensor, "heads modes"],
    times: Float[Tensor, "*batch h length"] | Int[Tensor, "*batch h length"],
) -> tuple[Float[Tensor, "*b heads length modes"], Float[Tensor, "*b heads length modes"]]:
    """`rotation` at times of each head, `(..., heads, length)`, or `(..., 1, length)` where all heads share them."""
    dtype = time_dtype(times.device)
    phase = times.to(dtype)[..., None] * frequency.to(dtype)[:, None, :]
    return phase.cos(), phase.sin()


def rotate(
    x: Float[Tensor, "batch heads length channels"],
    frequency: Float[Tensor, "heads modes"],
    times: Float[Tensor, "*batch length"] | Int[Tensor, "*batch length"],
    inverse: bool = False,
) -> Float[Tensor, "batch heads length channels"]:
    """`exp(+i omega t) x`, or `exp(-i omega t) x` when `inverse`.

    The first half of the channels holds the real parts, the second half the imaginary parts (appendix D.1).
    The inverse rotation is RoPE's map. It brings states of different times into the common frame of t = 0.

    Args:
        x: complex states as `2 * modes` real channels. The result has their dtype.
        frequency, times: as of `rotation`.
        inverse: turn backwards.
    """
    cos, sin = rotation(frequency, times)
    return turn(x, cos, -sin if inverse else sin)


def turn(
    x: Float[Tensor, "*batch heads length channels"],
    cos: Float[Tensor, "*b heads length modes"],
    sin: Float[Tensor, "*b heads length modes"],
) -> Float[Tensor, "*batch heads length channels"]:
    """`x` rotated by phases with known cosine and sine, as `rotation` gives them.

    States in half precision are rounded only once, at the end.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(dtype), sin.to(dtype)
    real, imaginary = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([cos * real - sin * imaginary, sin * real + cos * imaginary], dim=-1).to(x.dtype)


def decay_kernel(decay: Float[Tensor, "*#shape"], lag: Float[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    """`E(tau) = exp(-mu tau)`, the fraction of a state that remains after a lag (section 3.2).

    Args:
        decay: mu >= 0, per unit of time; broadcasts against `lag`.
        lag: tau >= 0, in units of time.
    """
    return torch.exp(-decay * lag)
