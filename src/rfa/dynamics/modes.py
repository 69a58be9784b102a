"""The modes of a head: their frequencies and decay, and how a state moves in time, by `exp(Lambda t)`.

`Lambda = -mu + i omega`: rotation and decay are its two factors.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rfa.checks import require


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


# Frequency banks and damping: which modes a head has, and how fast its states decay (section 3.7)


def _geometric(base: float, count: int) -> Tensor:
    """`base^(-m / count)`, m = 0 .. count - 1."""
    require(1 < base < math.inf, "base", base, "a number above 1")
    require(count >= 1, "modes", count, "at least 1")
    return base ** (-torch.arange(count, dtype=torch.float64) / count)


def _with_conjugates(positive: Tensor) -> Tensor:
    """`(w, -w)` side by side: the eigenvalues of a real process come in conjugate pairs (appendix D.1)."""
    return torch.stack([positive, -positive], dim=-1).flatten(-2).float()


def _check_modes(modes: int) -> None:
    require(modes >= 2 and modes % 2 == 0, "modes", modes, "an even number >= 2 (conjugate pairs)")


def rope_frequencies(heads: int, modes: int, base: float = 10000.0) -> Float[Tensor, "heads modes"]:
    """The RoPE bank `base^(-m / (d/2))`, m = 0 .. d/2 - 1, the same for all heads.

    Args:
        heads: number of heads H.
        modes: complex modes per head d, even.
        base: ratio of the fastest to the (never reached) slowest frequency.

    Returns:
        Frequencies in radians per unit of time, conjugate pairs adjacent.

    Raises:
        ValueError: if `modes` is odd or below 2, or `base` not above 1.
    """
    _check_modes(modes)
    return _with_conjugates(_geometric(base, modes // 2)).repeat(heads, 1)


def rotary_frequencies(heads: int, modes: int, base: float = 10000.0) -> Float[Tensor, "heads modes"]:
    """RoPE as published: `base^(-m / d)`, m = 0 .. d - 1, over all `2 d` channels of a head (no conjugate pairs).

    Args, returns and raises as `rope_frequencies`, but for any number of modes.
    """
    return _geometric(base, modes).float().repeat(heads, 1)


def partitioned_frequencies(heads: int, modes: int, base: float = 10000.0) -> Float[Tensor, "heads modes"]:
    """The partitioned bank of SC-RFA: `base^(-m / (H d/2))`, ascending, one band a head, head 0 the slowest.

    Args, returns and raises as `rope_frequencies`.
    """
    _check_modes(modes)
    ascending = _geometric(base, heads * modes // 2).flip(0)
    return _with_conjugates(ascending.view(heads, modes // 2))


def spectral_decay(
    frequency: Float[Tensor, "heads modes"], damping: float, zero_heads: int = 0
) -> Float[Tensor, " heads"]:
    """`mu_h = b max_k |omega_hk|`: over a cycle of its fastest mode, every head loses the same fraction of its state.

    Args:
        frequency: omega of each head, radians per unit of time.
        damping: the dimensionless coefficient b >= 0.
        zero_heads: this many heads, the first and slowest ones, do not decay.

    Returns:
        Decay rates per unit of time.

    Raises:
        ValueError: if `damping` or `zero_heads` is negative, or `damping` is infinite or NaN.
    """
    require(0 <= damping < math.inf, "damping", damping, "a finite number >= 0")
    require(zero_heads >= 0, "zero_heads", zero_heads, "a number >= 0")
    decay = damping * frequency.abs().amax(dim=-1)
    decay[:zero_heads] = 0.0
    return decay
