"""Forecasts on clusters are those of one process: numbers, ids, dates with their zones."""

import os
import sys

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("fugue")

from rfa.forecasting import Forecaster
from rfa.integrations.fugue import forecast

DAYS = pd.date_range("2024-03-01", periods=30, tz="Europe/Berlin")  # clocks change on the 31st


@pytest.fixture(scope="module")
def dask_client():
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**settings) as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def spark():
    sql = pytest.importorskip("pyspark.sql")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    pytest.importorskip("fugue_spark")
    settings = {"spark.sql.session.timeZone": "Europe/Berlin", "spark.ui.enabled": "false"}
    session = sql.SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2).config(map=settings)
    session = session.getOrCreate()
    yield session
    session.stop()


def panel(ids, stamps=DAYS, regressor=True):
    random = np.random.default_rng(0)
    parts = [
        pd.DataFrame({"unique_id": i, "ds": stamps, "y": 123456789 + 1000 * k + random.integers(0, 9, len(stamps))})
        for k, i in enumerate(ids)
    ]
    df = pd.concat(parts, ignore_index=True)
    return df.assign(flag=np.where(df.index % 7 == 3, None, df.index % 2 == 0)) if regressor else df


def future(ids):
    stamps = pd.date_range("2024-03-31", periods=2, tz="Europe/Berlin")
    return pd.DataFrame({"unique_id": np.repeat(ids, 2), "ds": [*stamps] * len(ids), "flag": [True, False] * len(ids)})


def same(found, expected):
    found = found.sort_values(["unique_id", "ds"]).reset_index(drop=True)
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.parametrize("engine", [None, "dask"])
def test_a_table_of_pandas_goes_and_comes_back_as_it_is(engine, request):
    engine = engine and request.getfixturevalue("dask_client")
    for ids in (pd.Categorical([*"bac"], categories=[*"zbac"]), np.array([1, "1", "x"], dtype=object)):
        df = panel(range(3))
        kept = pd.Series(ids)
        df["unique_id"] = kept.iloc[df["unique_id"]].array
        X = future(range(3))
        X["unique_id"] = kept.iloc[X["unique_id"]].array
        expected = Forecaster().forecast(df, 2, X=X)
        assert [str(x) for x in expected["ds"][:2]] == ["2024-03-31 00:00:00+01:00", "2024-04-01 00:00:00+02:00"]
        pd.testing.assert_frame_equal(forecast(df, 2, X=X.sample(frac=1), engine=engine, partitions=2), expected)


def test_a_table_of_dask_in_partitions(dask_client):
    dd = pytest.importorskip("dask.dataframe")
    df, X = panel("abcd"), future([*"abcd"])
    expected = Forecaster().forecast(df.assign(flag=df["flag"].astype("boolean")), 2, [95, 80, 80.0], X=X)
    typed = df.assign(flag=df["flag"].astype("boolean")).sample(frac=1, random_state=0)
    found = forecast(dd.from_pandas(typed, 2), 2, [95, 80, 80.0], X=dd.from_pandas(X, 1), partitions=2).compute()
    assert found.dtypes["ds"] == df["ds"].dtype
    assert found.dtypes["rfa"] == np.float64
    same(found.astype({"unique_id": df["unique_id"].dtype}), expected)


def test_ids_of_categories_and_numbers_on_dask(dask_client):
    dd = pytest.importorskip("dask.dataframe")
    for ids in ([3, 1, 2], ["c", "a", "b"]):
        df = panel(ids, np.arange(20), regressor=False)
        df = df.astype({"unique_id": "category"}) if ids[0] == "c" else df
        found = forecast(dd.from_pandas(df, 2), 3).compute()
        assert sorted(found["unique_id"].unique()) == sorted(ids)
        assert isinstance(found["unique_id"].dtype, pd.CategoricalDtype) == (ids[0] == "c")
        pd.testing.assert_series_equal(
            found.sort_values(["unique_id", "ds"])["rfa"].reset_index(drop=True), Forecaster().forecast(df, 3)["rfa"]
        )


def test_a_table_of_spark(spark):
    df = panel("abc", regressor=False)
    found = forecast(spark.createDataFrame(df), 2, partitions=2)
    assert dict(found.dtypes) == dict.fromkeys(found.columns, "double") | {"unique_id": "string", "ds": "timestamp"}
    rows = [(row["unique_id"], row["ds"].timestamp(), row["rfa"]) for row in found.sort("unique_id", "ds").collect()]
    expected = Forecaster().forecast(df, 2)
    assert rows == [
        (i, ds.timestamp(), y) for i, ds, y in zip(*(expected[x] for x in ("unique_id", "ds", "rfa")), strict=True)
    ]


def test_a_bad_series_is_warned_of_and_the_others_are_forecast():
    df = panel("ab", np.arange(20), regressor=False).astype({"y": object})
    df.loc[df["unique_id"] == "b", "y"] = "text"
    with pytest.warns(UserWarning, match=r"unique_id 'b': y: inf in row 20"):
        assert forecast(df, 2)["unique_id"].tolist() == ["a", "a"]
    with pytest.raises(ValueError, match="the future values of"):
        forecast(panel("a"), 2)
