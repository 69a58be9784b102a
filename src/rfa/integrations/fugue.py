"""The forecasts of a `Forecaster` on the machines of Dask or Spark, through fugue: each gets a block of series.

Clusters change what tables are: dates lose their zone, flags with gaps become text, categories are refused. So what
goes through fugue is plain: times as UTC integers, their zone by its name, readings and regressors as float64.
"""

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
from rfa.forecasting.steps import StampKind

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

    names, bands = Names(id_col, time_col, target_col), Quantiles.of(level, quantiles)
    require(id_col in df.columns, "df", list(df.columns), f"a column {id_col!r}")
    others = [name for name in df.columns if name not in names]
    require(not others or X is not None, "X", X, f"the future values of {others}, the other columns of df")
    ids, every = None, [df] if X is None else [df, X]
    if hasattr(df, "map_partitions"):
        kind = read_stamps(nw.from_native(df._meta[time_col], series_only=True))[1]
        calls = [partial(_plain, names=names, others=others, unit=kind.unit, future=k > 0) for k in range(len(every))]
        # Not as arguments: Dask makes tuples of named tuples.
        plain = [x.map_partitions(call, meta=call(x._meta)) for x, call in zip(every, calls, strict=True)]
        from dask.dataframe import concat

        frame = plain[0] if X is None else concat(plain)
    elif hasattr(df, "sparkSession"):
        from pyspark.sql import functions as F

        dated = df.schema[time_col].dataType.typeName() == "timestamp"
        zone = df.sparkSession.conf.get("spark.sql.session.timeZone")
        kind = StampKind(nw.Datetime("us", zone), "us", zone) if dated else StampKind(nw.Int64())
        time = F.unix_micros(time_col) if dated else F.col(time_col).cast("long")
        columns = [F.col(name).cast("double").alias(name) for name in (target_col, *others)]
        missing = F.lit(None).cast("double").alias(target_col)
        parts = [F.col(id_col), time.alias(time_col)]
        frame = df.select(*parts, *columns, F.lit(0).cast("double").alias(_FUTURE))
        if X is not None:
            frame = frame.unionByName(X.select(*parts, missing, *columns[1:], F.lit(1).cast("double").alias(_FUTURE)))
    else:
        tables = [as_table(each, names)[0] for each in every]
        kind = read_stamps(tables[0][time_col])[1]
        keys = [read_ids(table[id_col]) for table in tables]
        ids = Ids.of(tables[0][id_col], keys[0])
        code = {key: place for place, key in enumerate(ids.keys)}
        codes = [np.array([code.get(key, -1) for key in part], dtype=np.int64) for part in keys]
        plain = [_plain(x, names, others, kind.unit, k > 0, codes[k]) for k, x in enumerate(tables)]
        frame = pd.concat(plain, ignore_index=True)
        frame = frame[frame[id_col] >= 0]  # regressors of series that df has not
    id_type = "long" if ids is not None else str(api.get_schema(frame)[id_col].type)
    id_type = {"int64": "long", "string": "str", "large_string": "str", "double": "double"}.get(id_type, id_type)
    columns = ["rfa", *bands.columns]
    schema = f"`{id_col}`:{id_type},`{time_col}`:{'double' if kind.is_float else 'long'},"
    schema += ",".join(f"`{name}`:double" for name in columns)
    spread = {"by": [id_col], "algo": "coarse", **({} if partitions is None else {"num": partitions})}
    settings = {"id_col": id_col, "time_col": time_col, "target_col": target_col, **options}
    call = {"h": h, "level": level, "quantiles": quantiles}
    given = {"settings": settings, "call": call, "kind": kind, "regressors": others}
    found = api.transform(frame, _block, schema=schema, params=given, partition=spread, engine=engine)
    if ids is not None:
        found = api.as_pandas(found).sort_values([id_col, time_col])
        stamps = found[time_col].to_numpy(dtype=np.float64 if kind.is_float else np.int64)
        numbers = {name: found[name].to_numpy(dtype=np.float64) for name in columns}
        dates = stamp_column(time_col, stamps, kind, ids.backend)
        return ids.table({time_col: dates, **numbers}, found[id_col].to_numpy(dtype=np.int64), id_col)
    if hasattr(df, "map_partitions"):
        restored = partial(_restored, names=names, kind=kind, dtype=df._meta[id_col].dtype)
        return found.map_partitions(restored, meta=restored(found._meta))
    return found.withColumn(time_col, F.timestamp_micros(time_col)) if dated else found


def _plain(table: Any, names: Names, others: list[str], unit: str, future: bool, codes: Any = None) -> pd.DataFrame:
    """A table of pandas or polars as integers, float64 and ids."""
    given = nw.from_native(table, eager_only=True, pass_through=False)
    target = np.full(len(given), np.nan) if future else _numbers(given[names.target])
    ids = table[names.id].reset_index(drop=True) if codes is None else codes
    ids = ids.astype(ids.cat.categories.dtype) if isinstance(getattr(ids, "dtype", None), pd.CategoricalDtype) else ids
    parts = {names.id: ids, names.time: read_stamps(given[names.time], unit=unit)[0], names.target: target}
    parts |= {name: _numbers(given[name]) for name in others}
    return pd.DataFrame(parts | {_FUTURE: np.full(len(given), float(future))})


def _numbers(column: Any) -> np.ndarray:
    numbers, wrong = read_numbers(column)
    numbers[list(wrong)] = np.inf
    return numbers


def _block(frame: pd.DataFrame, settings: dict, call: dict, kind: StampKind, regressors: list[str]) -> pd.DataFrame:
    """Forecast a block of series."""
    forecaster, (key, time, target) = Forecaster(**settings), [settings[f"{x}_col"] for x in ("id", "time", "target")]
    stamps = frame[time].to_numpy(dtype=np.float64 if kind.is_float else np.int64)
    columns = {name: frame[name].to_numpy(dtype=np.float64) for name in (target, *regressors)}
    dates = stamp_column(time, stamps, kind, "pandas").to_native()
    rows = pd.DataFrame({key: frame[key].to_numpy(), time: dates, **columns})
    future = frame[_FUTURE].to_numpy(dtype=np.float64) > 0
    try:
        found = forecaster.forecast(rows[~future], X=rows[future].drop(columns=target) if regressors else None, **call)
    except ValueError:
        if not forecaster.failed:
            raise
        found = None
    for failed in forecaster.failed:
        warnings.warn(f"{key} {failed.id!r}: {failed.reason}", stacklevel=2)
    if found is None:
        bands = Quantiles.of(call["level"], call["quantiles"]).columns
        return pd.DataFrame({key: frame[key][:0], time: stamps[:0], **{x: np.zeros(0) for x in ("rfa", *bands)}})
    return found.assign(**{time: read_stamps(nw.from_native(found[time], series_only=True), unit=kind.unit)[0]})


def _restored(found: pd.DataFrame, names: Names, kind: StampKind, dtype: Any) -> pd.DataFrame:
    """A block as Dask has it, with ids and dates as they were given."""
    stamps = found[names.time].to_numpy(dtype=np.float64 if kind.is_float else np.int64)
    dates = stamp_column(names.time, stamps, kind, "pandas").to_native()
    numbers = {name: found[name].to_numpy(dtype=np.float64) for name in found.columns if name.startswith("rfa")}
    return pd.DataFrame({names.id: found[names.id].reset_index(drop=True).astype(dtype), names.time: dates, **numbers})
