"""The forecasts of a `Forecaster` on the machines of Dask or Spark, through fugue: each gets a block of series.

Clusters change what tables are: dates lose their zone, flags with gaps become text, categories are refused. So what
goes through fugue is plain: times as UTC integers, their zone by its name, readings and regressors as float64.
"""

from rfa.checks import needs

needs("fugue")

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import narwhals as nw
import numpy as np
import pandas as pd

from rfa.checks import require
from rfa.forecasting.forecaster import Forecaster, Quantiles
from rfa.forecasting.frames import Ids, Names, as_table, read_ids, read_numbers, read_stamps, stamp_column
from rfa.steps import StampKind

_FUTURE = "rfa_is_future"  # rows of regressors to come


def forecast(
    df: Any,
    h: int | str,
    level: Iterable[float] | float | None = (80, 90),
    quantiles: Iterable[float] | None = None,
    X: Any = None,
    *,
    engine: Any = None,
    partitions: int | None = None,
    id_col: str = "unique_id",
    time_col: str = "ds",
    target_col: str = "y",
    **options: Any,
) -> Any:
    """Forecast each series of a table of pandas, polars, Dask or Spark.

    Args:
        df, h, level, quantiles, X: as in `Forecaster.forecast`; `X` is a table of the same library.
        engine: of fugue: "dask", a client of Dask, a session of Spark. None: this process, or that of the table.
        partitions: number of blocks. None: as the engine has it.
        id_col, time_col, target_col: names of columns. The column of ids is needed.
        options: further ones of `Forecaster`.

    Returns:
        The table of `Forecaster.forecast`, of the library of `df`; lazy on a cluster, where rows have no order. Series
        that cannot be done are left out, and their workers warn with id and reason.

    Raises:
        ValueError: as `Forecaster.forecast`.
    """
    from fugue import api
    from triad import Schema

    names, bands = Names(id_col, time_col, target_col), Quantiles.of(level, quantiles)
    others = [name for name in df.columns if name not in names]
    require(id_col in df.columns, "df", list(df.columns), f"a column {id_col!r}")
    require(not others or X is not None, "X", X, f"the future values of {others}, the other columns of df")
    ids, every, columns = None, [df] if X is None else [df, X], ["rfa", *bands.columns]
    if hasattr(df, "map_partitions"):  # of Dask
        from dask.dataframe import concat

        kind = read_stamps(nw.from_native(df._meta[time_col], series_only=True))[1]
        calls = [partial(_plain, names=names, others=others, unit=kind.unit, future=k > 0) for k in range(len(every))]
        frame = concat([x.map_partitions(call, meta=call(x._meta)) for x, call in zip(every, calls, strict=True)])
    elif hasattr(df, "sparkSession"):
        from pyspark.sql import functions as F

        zone = df.sparkSession.conf.get("spark.sql.session.timeZone")
        dated = df.schema[time_col].dataType.typeName() == "timestamp"
        kind = StampKind(nw.Datetime("us", zone), "us", zone) if dated else StampKind(nw.Int64())
        time = F.unix_micros(time_col) if dated else F.col(time_col).cast("long")
        known = [F.col(id_col), time.alias(time_col), *(F.col(name).cast("double").alias(name) for name in others)]
        frame = df.select(*known, F.col(target_col).cast("double").alias(target_col), F.lit(0.0).alias(_FUTURE))
        if X is not None:
            frame = frame.unionByName(X.select(*known, F.lit(1.0).alias(_FUTURE)), allowMissingColumns=True)
    else:
        (table, period), *rest = [as_table(each, names) for each in every]
        kind, tables = read_stamps(table[time_col], period)[1], [table, *(each for each, _ in rest)]
        keys = [read_ids(each[id_col]) for each in tables]
        ids = Ids.of(table[id_col], keys[0])
        code = {key: place for place, key in enumerate(ids.keys)}
        plain = [_plain(each, names, others, kind.unit, k > 0) for k, each in enumerate(tables)]
        for part, own in zip(plain, keys, strict=True):
            part[id_col] = np.array([code.get(key, -1) for key in own], dtype=np.int64)
        frame = pd.concat(plain, ignore_index=True)
        frame = frame[frame[id_col] >= 0]  # regressors of series that df has not
    shown = None if ids is None else [repr(ids.value(place)) for place in range(len(ids.keys))]
    settings = {"id_col": id_col, "time_col": time_col, "target_col": target_col, **options}
    call = {"h": h, "level": level, "quantiles": quantiles}
    given = {"settings": settings, "call": call, "kind": kind, "regressors": others, "shown": shown}
    schema = api.get_schema(frame).extract([id_col, time_col]) + Schema([(name, np.float64) for name in columns])
    spread = {"by": [id_col], "algo": "coarse", **({} if partitions is None else {"num": partitions})}
    found = api.transform(frame, _block, schema=schema, params=given, partition=spread, engine=engine)
    if ids is not None:
        found = api.as_pandas(found).sort_values([id_col, time_col])
        dates = stamp_column(time_col, _stamps(found[time_col], kind), kind, ids.backend)
        numbers = {name: found[name].to_numpy(dtype=np.float64) for name in columns}
        return ids.table({time_col: dates, **numbers}, found[id_col].to_numpy(dtype=np.int64), id_col)
    if hasattr(df, "map_partitions"):
        restored = partial(_with_stamps, kind=kind, types=df._meta.dtypes[[id_col]].to_dict(), time=time_col)
        return found.map_partitions(restored, meta=restored(found._meta))
    return found.withColumn(time_col, F.timestamp_micros(time_col)) if dated else found


def _plain(table: Any, names: Names, others: list[str], unit: str, future: bool) -> pd.DataFrame:
    """A table of pandas or polars as integers, float64 and ids."""
    given = nw.from_native(table, eager_only=True, pass_through=False)
    parts: dict[str, Any] = {names.id: given[names.id].to_pandas().reset_index(drop=True)}
    if isinstance(parts[names.id].dtype, pd.CategoricalDtype):
        parts[names.id] = parts[names.id].astype(parts[names.id].cat.categories.dtype)
    parts[names.time] = read_stamps(given[names.time], unit=unit)[0]
    for name in [*others, *([] if future else [names.target])]:
        parts[name], wrong = read_numbers(given[name])
        parts[name][list(wrong)] = np.inf  # told of where the series is forecast
    return pd.DataFrame(parts | {_FUTURE: np.full(len(given), float(future))})


def _block(
    frame: pd.DataFrame, settings: dict, call: dict, kind: StampKind, regressors: list[str], shown: list[str] | None
) -> pd.DataFrame:
    """Forecast a block of series."""
    forecaster, (key, time, target) = Forecaster(**settings), [settings[f"{x}_col"] for x in ("id", "time", "target")]
    kind = kind._replace(period=None)
    rows = _with_stamps(frame, kind, {name: np.float64 for name in (target, *regressors, _FUTURE)}, time)
    future = rows.pop(_FUTURE) > 0
    try:
        found = forecaster.forecast(rows[~future], X=rows[future].drop(columns=target) if regressors else None, **call)
    except ValueError:
        if not forecaster.failed:
            raise
        columns = ["rfa", *Quantiles.of(call["level"], call["quantiles"]).columns]
        found = rows[:0].drop(columns=[target, *regressors]).assign(**dict.fromkeys(columns, np.zeros(0)))
    for each in forecaster.failed:
        warnings.warn(f"{key} {shown[each.id] if shown else repr(each.id)}: {each.reason}", stacklevel=2)
    return found.assign(**{time: read_stamps(nw.from_native(found[time], series_only=True), unit=kind.unit)[0]})


def _stamps(column: Any, kind: StampKind) -> np.ndarray:
    return column.to_numpy(dtype=np.float64 if kind.is_float else np.int64)


def _with_stamps(frame: pd.DataFrame, kind: StampKind, types: dict[str, Any], time: str) -> pd.DataFrame:
    """A block with dates as they were given; a cluster has other types of numbers and of text."""
    numbers = {name: np.float64 for name in frame.columns if name.startswith("rfa")}
    found = frame.reset_index(drop=True).astype(numbers | types)
    found[time] = stamp_column(time, _stamps(found[time], kind), kind, "pandas").to_native()
    return found
