"""Times and observations in one form: a sorted grid of all the moments that matter."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .information import Information, masked, whitened
from .linear_sde import LinearSDE
from .matrices import real

_FURTHEST = 1e100  # a reading, in units of its noise
_SHARPEST = 1e45  # what a row of C is in units of the noise: squares of squares must not overflow
_GAP = 1e7  # between the far readings and the others, in units of these: the far ones are no readings


@dataclass(frozen=True)
class Grid:
    """Observation times and query times of all series, sorted; a query stands behind an observation at the same time.

    Args:
        times: `(b, G)`.
        seen: what the observation at each moment says, `(b, G, ...)`, its precision `(models, G, n, n)`; nothing at a
            query.
        key: `(b, G)`: which observation a moment is, -1 for queries.
        wanted: `(b, queries)`: the moments that are asked for.
        present: `(b, G)`: whether anything was seen.
        seen_components: `(b, G)`: how many of the m components were seen.
        whitened: rows `(models, G, m, n)` and values `(b, G, m)` as seen through unit noise, zeros where nothing was.
        values: z, zeros where nothing was seen, `(b, G, m)`.
        lags: `(b, G - 1)`.
        shape: the batch dimensions, of which b is the product.
        models: 1 where series differ in their measurements only, not in when, of what or whether at all; else b.
    """

    times: Tensor
    seen: Information
    key: Tensor
    wanted: Tensor
    present: Tensor
    seen_components: Tensor
    whitened: tuple[Tensor, Tensor]
    values: Tensor
    lags: Tensor
    shape: torch.Size
    models: int

    def limited(self) -> "Grid":
        """With readings so far off that their squares overflow where they do not: they are rejected there as well.

        Raises:
            ValueError: where the noise is so small that squares of what is seen overflow.
        """
        rows, values = self.whitened
        if bool((rows.detach().abs() > _SHARPEST).any()):
            raise ValueError(
                f"observation_noise: got a standard deviation of less than 1 / {_SHARPEST:g} of what the states show, "
                "expected another unit for observations and states"
            )
        if not bool((values.abs() > _FURTHEST).any()):
            return self
        white = rows, values.clamp(min=-_FURTHEST, max=_FURTHEST)
        return replace(self, seen=Information.of(*white), whitened=white)

    def twice(self) -> "Grid":
        """Every series twice, all of them and all of them again; a model that all share stays one."""

        def twice(x: Tensor) -> Tensor:
            return torch.cat([x, x])

        shared = self.models == 1
        (rows, white), (matrix, *seen) = self.whitened, self.seen
        return replace(
            self,
            seen=Information(matrix if shared else twice(matrix), *map(twice, seen)),
            whitened=(rows if shared else twice(rows), twice(white)),
            models=1 if shared else 2 * self.models,
            times=twice(self.times),
            key=twice(self.key),
            present=twice(self.present),
            seen_components=twice(self.seen_components),
            values=twice(self.values),
            lags=twice(self.lags),
        )

    def weighted(self, weight: Tensor) -> "Grid":
        """The same with the noise of each moment's observation divided by its weight, `(b, G)`."""
        root, (rows, values) = weight.sqrt(), self.whitened
        white = rows * root[..., None, None], values * root[..., None]
        return replace(self, seen=self.seen.weighted(weight), whitened=white, models=len(weight))


def flat(x: Tensor, shape: torch.Size, kept: int) -> Tensor:
    """`(*shape, ...)` as `(b, ...)`, with the last `kept` dimensions as they are."""
    return x.expand(*shape, *x.shape[x.dim() - kept :]).reshape(-1, *x.shape[x.dim() - kept :])


def make_grid(
    sde: LinearSDE,
    times: Tensor,
    observations: Tensor,
    query_times: Tensor | None,
    starts: tuple[torch.Size, ...] = (),
    robust: bool = False,
) -> Grid:
    """The grid of one estimation.

    Args:
        sde, times, observations, query_times: as `robust_estimate`.
        starts: the batch dimensions of what is known of the first moment.
        robust: for robust estimates of a whole record: first readings that cannot be any are missing (`plausible`).

    Raises:
        ValueError: for times that do not increase or are not finite, observations of another width or length, infinite
            observations, no series at all, or batch dimensions that do not broadcast.
    """
    times, observations = real("times", times), real("observations", observations)
    _check_times("times", times)
    m, length = sde.observation_size, times.shape[-1]
    if bool((times.diff(dim=-1) <= 0).any()):
        raise ValueError("times: got times that do not increase, expected strictly increasing ones")
    if observations.dim() < 2 or tuple(observations.shape[-2:]) != (length, m):
        raise ValueError(
            f"observations: got shape {tuple(observations.shape)}, expected (..., {length}, {m}), one row of {m} "
            "numbers a time"
        )
    if bool(observations.isinf().any()):
        raise ValueError("observations: got infinite values, expected finite numbers, or NaN for what is missing")
    parts = [sde.batch_shape, times.shape[:-1], observations.shape[:-2]]
    if query_times is not None:
        query_times = real("query_times", query_times)
        _check_times("query_times", query_times)
        parts.append(query_times.shape[:-1])
    try:
        shape = torch.broadcast_shapes(*parts)
    except RuntimeError:
        given = ", ".join(str(tuple(part)) for part in parts)
        raise ValueError(f"observations: got batch dimensions {given}, expected shapes that broadcast") from None
    try:
        shape = torch.broadcast_shapes(shape, *starts)
    except RuntimeError:
        given = ", ".join(str(tuple(part)) for part in starts)
        raise ValueError(
            f"initial: got batch dimensions {given} of mean and covariance, expected shapes that broadcast with "
            f"{tuple(shape)}"
        ) from None
    if not shape.numel():
        raise ValueError(f"observations: got batch dimensions {tuple(shape)}, expected at least one series")
    if robust:
        observations = plausible(sde, times.expand(*shape, length), observations.expand(*shape, length, m))
    times, observations = flat(times, shape, 1), flat(observations, shape, 2)
    key = torch.arange(length, device=times.device).expand_as(times)
    wanted = key
    if query_times is not None:
        queries = flat(query_times, shape, 1)
        both = torch.cat([times, queries], dim=-1)
        times, order = both.sort(dim=-1, stable=True)
        place = order.argsort(dim=-1)
        key = torch.where(order < length, order, -1)
        at = torch.searchsorted(both[:, :length].contiguous(), queries.contiguous()).clamp(max=length - 1)
        same = both.gather(-1, at) == queries  # a query at an observation's time is that observation's own
        wanted = torch.where(same, place.gather(-1, at), place[:, length:])
        gap = torch.full_like(queries[..., None].expand(-1, -1, m), torch.nan)
        observations = torch.cat([observations, gap], dim=1).gather(1, order[..., None].expand(-1, -1, m))
    here = ~observations.isnan()
    one = all(part.numel() == 1 for part in (*parts[:2], *parts[3:])) and bool((here == here[:1]).all())
    models = 1 if one else len(times)
    observation, noise = (flat(x, shape, 2)[:models, None] for x in (sde.observation, sde.observation_noise))
    rows, noise = masked(observation, noise, here[:models])
    values = observations.masked_fill(~here, 0.0)
    white = whitened(rows, noise, values)
    lags, present = times.diff(dim=-1), here.any(-1)
    components = here.sum(-1)
    return Grid(times, Information.of(*white), key, wanted, present, components, white, values, lags, shape, models)


def plausible(sde: LinearSDE, times: Tensor, observations: Tensor) -> Tensor:
    """Observations with NaN for first readings that cannot be any: fill values such as -3.4e38, say.

    Nothing predicts the rows that determine the state, and a fill value among them leaves no digits of the others. Of
    these rows a component counts as missing where its distance from the series' median is more than 1e7 times as large
    as the next smaller one and as the standard deviation of the noise and of what the process may move in all the time;
    and where fewer than half lie that far.
    """
    deviation = sde.observation_noise.detach().diagonal(dim1=-2, dim2=-1).sqrt()[..., None, :]
    values = observations.detach().to(torch.float64)
    far = ((values - values.nanmedian(dim=-2, keepdim=True).values) / deviation).abs()
    if not bool((far > _GAP).any()):
        return observations
    with torch.no_grad():
        variance = sde.covariance(times[..., -1:] - times[..., :1])
        rows = sde.observation[..., None, :, :]
        moved = (rows @ variance @ rows.mT).diagonal(dim1=-2, dim2=-1).sqrt() / deviation
        ordered = far.sort(dim=-2).values.nan_to_num(nan=torch.inf)
        count = (~values.isnan()).sum(-2, keepdim=True)
        place = torch.arange(1, ordered.shape[-2], device=far.device)[:, None]
        apart = ordered[..., 1:, :] > _GAP * torch.maximum(ordered[..., :-1, :], 1 + moved)
        apart = apart & (place < count) & (2 * place > count)
        least = torch.where(apart, ordered[..., 1:, :], torch.inf).amin(-2, keepdim=True)
        sound = (~values.isnan()).any(-1) & ~(far >= least).any(-1)
        determine = -(-sde.state_size // sde.observation_size)
        first = sound.cumsum(-1) - sound.to(torch.long) < determine
    return torch.where((far >= least) & first[..., None], torch.nan, observations)


def _check_times(name: str, given: Tensor) -> None:
    if not given.dim() or not given.shape[-1]:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected (..., T) with at least one time")
    if not bool(given.isfinite().all()):
        raise ValueError(f"{name}: got NaN or infinite values, expected finite numbers")
