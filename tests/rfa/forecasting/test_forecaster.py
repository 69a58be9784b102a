"""The forecaster: tables in and out. Nothing here depends on the numbers of the engine but where it says so."""

import re

import numpy as np
import pandas as pd
import pytest

from rfa.forecasting import Forecaster
from rfa.steps import StampKind, usual_steps

MONTHS = pd.date_range("2020-01-31", periods=36, freq="ME")
WEEKS = pd.date_range("2024-01-07", periods=20, freq="W")


def series(stamps=MONTHS, seed=0, level=20.0):
    return level + np.random.default_rng(seed).normal(size=len(stamps)).cumsum()


def panel(ids=("a", "b", "c"), stamps=MONTHS):
    parts = [pd.DataFrame({"unique_id": i, "ds": stamps, "y": series(stamps, k)}) for k, i in enumerate(ids)]
    return pd.concat(parts, ignore_index=True)


def one(stamps, **columns):
    return pd.DataFrame({"ds": stamps, "y": series(stamps), **columns})


def test_rows_in_any_order_give_one_forecast():
    df = panel()
    expected = Forecaster().forecast(df, h=3)
    found = Forecaster(workers=2).forecast(df.sample(frac=1, random_state=0), h=3)
    pd.testing.assert_frame_equal(found, expected)
    assert found.columns.tolist() == ["unique_id", "ds", "rfa", "rfa-lo-80", "rfa-hi-80", "rfa-lo-90", "rfa-hi-90"]
    assert found["unique_id"].tolist() == [*"aaabbbccc"]
    assert found.index.tolist() == list(range(9))
    assert (found["rfa-lo-90"] <= found["rfa-lo-80"]).all()
    assert (found["rfa-hi-80"] <= found["rfa-hi-90"]).all()


def test_other_names_of_columns():
    df = panel().rename(columns={"unique_id": "shop", "ds": "day", "y": "sales"})
    found = Forecaster(id_col="shop", time_col="day", target_col="sales").cross_validation(df, h=1, level=None)
    assert found.columns.tolist() == ["shop", "day", "cutoff", "sales", "rfa"]


@pytest.mark.parametrize(
    ("stamps", "h", "expected"),
    [
        (MONTHS, "3M", ["2023-01-31", "2023-02-28", "2023-03-31"]),
        (MONTHS[:14], "12M", [str(x.date()) for x in MONTHS[14:26]]),  # from the 28th to the 29th of February
        (pd.date_range("2020-01-01", periods=20, freq="QS"), "1Y", [f"2025-{x}-01" for x in ("01", "04", "07", "10")]),
        (pd.bdate_range("2024-01-01", periods=15), 3, ["2024-01-22", "2024-01-23", "2024-01-24"]),
        (pd.bdate_range("2024-01-01", periods=15).delete(3), "1w", [f"2024-01-{d}" for d in (22, 23, 24, 25, 26)]),
        (WEEKS, "2w", ["2024-05-26", "2024-06-02"]),
        (pd.date_range("2023-01-31", periods=20, freq="BME"), 2, ["2024-09-30", "2024-10-31"]),
        (pd.date_range("2024-01-01", periods=20, freq="12h"), "24h", ["2024-01-11", "2024-01-11 12:00"]),
        (pd.date_range("2020-01-15", periods=20, freq="MS") + pd.Timedelta("14D"), 2, ["2021-10-15", "2021-11-15"]),
        (MONTHS.delete(7).insert(7, pd.Timestamp("2020-08-15")), 2, ["2023-01-31", "2023-02-28"]),  # one off the grid
        (WEEKS.delete(19).insert(19, pd.Timestamp("2024-05-21")), 1, ["2024-05-26"]),  # the last on a Tuesday
        (np.arange(20) * 5, 2, [100, 105]),
        (np.arange(250, 255, dtype=np.uint8), 1, [255]),
        (np.arange(250, 255, dtype=np.uint8), 2, [255, 256]),
    ],
)
def test_stamps_go_on_as_the_series_own_do(stamps, h, expected):
    forecaster = Forecaster()
    found = forecaster.forecast(one(stamps), h)["ds"]
    assert found.tolist() == [pd.Timestamp(x) if isinstance(x, str) else x for x in expected]
    assert forecaster.history()["ds"].tolist() == stamps.tolist()


@pytest.mark.parametrize(
    ("freq", "years", "expected"),
    [
        ("W", 3, (52.1775, 0)),
        ("D", 1.9, (7, 0)),
        ("D", 2.1, (365.2425, 7)),
        ("B", 3, (5, 0)),
        ("h", 0.1, (24, 168)),
        ("BME", 5, (12, 0)),
        ("BMS", 5, (12, 0)),
        ("BQE", 9, (4, 0)),
    ],
)
def test_the_calendar_suggests_seasons(freq, years, expected):
    stamps = pd.date_range("2020-01-01", pd.Timestamp("2020-01-01") + pd.Timedelta(days=365.25 * years), freq=freq)
    clock = stamps.to_numpy().astype("M8[ns]").view(np.int64)
    steps = usual_steps(clock, StampKind(None, "ns"))
    assert steps.seasons(len(stamps) - 1) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("freq", "apart", "expected"), [("ME", 3, 12), ("ME", -3, 12), ("MS", 3, 12), ("QS", 3, 4), ("MS", 20, 0)]
)
def test_months_whose_stamps_come_late_or_early_have_a_year(freq, apart, expected):
    stamps = pd.date_range("2015-01-01", periods=48, freq=freq)
    days = np.sign(apart) * np.random.default_rng(0).integers(0, abs(apart) + 1, size=48)
    late = (stamps + pd.to_timedelta(days, "D")).to_numpy().astype("M8[ns]").view(np.int64)
    steps = usual_steps(late, StampKind(None, "ns"))
    assert steps.seasons(47) == (expected, 0)
    if expected:  # on the day itself
        after = pd.date_range(stamps[-1], periods=4, freq=freq)[1:]
        assert steps.later(late[-1], 3).tolist() == after.to_numpy().astype("M8[ns]").view(np.int64).tolist()


def test_irregular_times_are_kept():
    times = np.cumsum(np.random.default_rng(0).exponential(size=40))
    forecaster = Forecaster()
    found = forecaster.forecast(one(times), 3)
    np.testing.assert_allclose(np.diff(found["ds"], prepend=times[-1]), np.sort(np.diff(times))[19])
    assert forecaster.history()["ds"].tolist() == times.tolist()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_local_midnights_over_the_change_of_clocks(unit):
    days = pd.date_range("2024-03-01", periods=30, tz="Europe/Berlin").as_unit(unit)  # clocks change on the 31st
    found = Forecaster().forecast(one(days), 3)["ds"]
    assert found.dtype == days.dtype
    assert [str(x) for x in found] == [
        "2024-03-31 00:00:00+01:00",
        "2024-04-01 00:00:00+02:00",
        "2024-04-02 00:00:00+02:00",
    ]
    hours = pd.date_range("2024-03-30", periods=24, freq="h", tz="Europe/Berlin")
    assert [x.hour for x in Forecaster().forecast(one(hours), 4)["ds"]] == [0, 1, 3, 4]


def test_a_series_of_pandas_and_periods():
    dated = pd.Series(series(), MONTHS)
    assert Forecaster().forecast(dated, 1)["ds"].tolist() == [pd.Timestamp("2023-01-31")]
    found = Forecaster().forecast(pd.Series(series(), MONTHS.to_period("M")), "2M")
    assert found["ds"].tolist() == [pd.Period("2023-01"), pd.Period("2023-02")]
    assert found.columns.tolist()[:2] == ["ds", "rfa"]
    assert Forecaster().forecast({"ds": [1, 2, 3], "y": [1.0, 2, 3]}, 1)["ds"].tolist() == [4]


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        (pd.Categorical(["u", "b", "a"], categories=["z", "u", "b", "a"]), ["a", "b", "u"]),
        (np.array([1, "1", True], dtype=object), [True, 1, "1"]),
        (pd.date_range("2024-01-01", periods=3), list(pd.date_range("2024-01-01", periods=3))),
    ],
)
def test_ids_of_any_type_come_back_as_they_were(ids, kept):
    df = panel(range(3))
    df["unique_id"] = ids[df["unique_id"]]
    forecaster = Forecaster()
    for found in (forecaster.forecast(df, 1), forecaster.history(), forecaster.cross_validation(df, 1)):
        assert found["unique_id"].dtype == df["unique_id"].dtype
        assert list(dict.fromkeys((type(x).__name__, x) for x in found["unique_id"])) == [
            (type(x).__name__, x) for x in pd.Series(kept, dtype=df["unique_id"].dtype)
        ]
    assert len(forecaster.history()) == len(df)


@pytest.mark.parametrize("absent", [None, np.nan, pd.NA])
def test_rows_without_an_id_are_refused(absent):
    df = panel().astype({"unique_id": object})
    df.loc[5, "unique_id"] = absent
    with pytest.raises(ValueError, match=r"unique_id: got .* in row 5"):
        Forecaster().forecast(df, 1)


def with_regressors(**changes):
    df = panel("ab")
    df["price"], df["flag"] = np.arange(72) % 5, [bool(k % 3) for k in range(72)]
    df["y"] = 100 + 2.0 * df["price"] + 50 * df["flag"]  # exactly, so that the engine's answer is known
    stamps = pd.date_range("2023-01-31", periods=2, freq="ME")
    X = pd.DataFrame({"unique_id": [*"aabb"], "ds": [*stamps] * 2, "price": [1, 2, 3, 4], "flag": [True, False] * 2})
    return df.assign(**changes), X


def test_regressors_are_joined_by_name_id_and_stamp():
    df, X = with_regressors()
    found = Forecaster().forecast(df, 2, X=X, level=None)
    np.testing.assert_allclose(found["rfa"], [152, 104, 156, 108], rtol=0.02)
    more = pd.concat([X, X.assign(ds=X["ds"] + pd.Timedelta("900D"), price=99), X.assign(unique_id="z")])
    shuffled = more.sample(frac=1, random_state=1)[["flag", "ds", "price", "unique_id"]]
    pd.testing.assert_frame_equal(Forecaster().forecast(df, 2, X=shuffled, level=None), found)


def test_a_missing_future_regressor_is_named_and_the_others_are_forecast():
    df, X = with_regressors()
    forecaster = Forecaster()
    found = forecaster.forecast(df, 2, X=X.drop(index=3))
    assert found["unique_id"].unique().tolist() == ["a"]
    assert forecaster.failed == [("b", "X: 'price' is missing for unique_id 'b', ds 2023-02-28")]
    forecaster.forecast(df, 2, X=X.assign(flag=[True, None, True, True]))
    assert forecaster.failed == [("a", "X: 'flag' is missing for unique_id 'a', ds 2023-02-28")]


def test_levels_stand_once_in_order_with_one_rule_of_names():
    found = Forecaster().forecast(panel("a"), 1, level=[95, 80, 80.0, 99.5], quantiles=[0.9, 0.025])
    bands = [f"rfa-{side}-{level}" for level in ("80", "95", "99.5") for side in ("lo", "hi")]
    assert found.columns.tolist() == ["unique_id", "ds", "rfa", *bands, "rfa-q-2.5", "rfa-q-90"]
    assert found["rfa-q-2.5"].tolist() == pytest.approx(found["rfa-lo-95"].tolist())


def test_cross_validation_leaves_missing_actuals_out():
    df = panel("ab")
    df.loc[[35, 70], "y"] = np.nan
    found = Forecaster().cross_validation(df, h=2, n_windows=2, step_size=2, level=[90])
    assert found.columns.tolist() == ["unique_id", "ds", "cutoff", "y", "rfa", "rfa-lo-90", "rfa-hi-90"]
    assert len(found) == 6
    assert found["y"].notna().all()
    assert found["cutoff"].dtype == df["ds"].dtype
    joined = found.merge(df, on=["unique_id", "ds"])
    assert joined["y_x"].tolist() == joined["y_y"].tolist()
    assert sorted({*found["cutoff"]}) == [pd.Timestamp("2022-08-31"), pd.Timestamp("2022-10-31")]
    cut = df[df["ds"] <= "2022-08-31"]
    alone = Forecaster().forecast(cut, 2, level=[90])
    both = found[found["cutoff"] == "2022-08-31"].merge(alone, on=["unique_id", "ds"])
    assert both["rfa_x"].tolist() == both["rfa_y"].tolist()


def test_update_goes_on_and_history_grows(tmp_path):
    df = panel("ab")
    forecaster = Forecaster()
    forecaster.forecast(df, 2, level=[90])
    later = pd.DataFrame({"unique_id": ["b", "z", "a"], "ds": ["2023-01-31", "2023-01-31", "2022-01-31"], "y": 1})
    found = forecaster.update(later.assign(ds=pd.to_datetime(later["ds"]), note="text"))
    assert found["ds"].tolist() == [pd.Timestamp("2023-02-28"), pd.Timestamp("2023-03-31")]
    assert [failure.id for failure in forecaster.failed] == ["a", "z"]
    history = forecaster.history()
    assert len(history) == len(df) + 1
    assert history.columns.tolist()[1:] == ["ds", "y", "rfa", "rfa-lo-90", "rfa-hi-90", "weight", "outlier", "cleaned"]
    assert forecaster.explain().columns.tolist() == ["unique_id", "member", "weight", "error", "step", "season", "note"]


def test_history_marks_and_cleans_a_wrong_reading():
    df = panel("a")
    df.loc[12, "y"], df.loc[20, "y"] = 5000.0, np.nan
    forecaster = Forecaster()
    forecaster.forecast(df, 1)
    history = forecaster.history()
    assert history["outlier"].tolist() == [k == 12 for k in range(36)]
    assert history["weight"][12] < 0.1
    assert history["cleaned"].between(0, 100).all()
    kept = history.drop(index=[12, 20])
    assert kept["cleaned"].tolist() == kept["y"].tolist()


@pytest.mark.parametrize("kind", ["polars", "ordered", "enum", "periods", "zone", "one"])
def test_a_saved_forecaster_goes_on(kind, tmp_path):
    stamps = pd.date_range("2024-03-01", periods=36, tz="Europe/Berlin") if kind == "zone" else MONTHS
    df, later = panel(pd.Categorical(["b", "a"]), stamps), panel("ab", stamps[-1:] + (stamps[-1] - stamps[-2]))
    ids = pd.CategoricalDtype([*"zba"], ordered=True) if kind in ("ordered", "enum") else "category"
    df, later = (x.astype({"unique_id": ids}) for x in (df, later))
    if kind == "periods":
        df, later = (x.assign(ds=x["ds"].dt.to_period("M")) for x in (df, later))
    if kind in ("polars", "enum"):
        pl = pytest.importorskip("polars")
        own = pl.Enum([*"zba"]) if kind == "enum" else pl.Categorical
        df, later = (pl.from_pandas(x).with_columns(pl.col("unique_id").cast(own)) for x in (df, later))
    if kind == "one":
        df, later = (x[x["unique_id"] == "a"].drop(columns="unique_id") for x in (df, later))
    forecaster = Forecaster()
    expected = forecaster.forecast(df, 3, level=[80])
    forecaster.save(tmp_path / "f")
    loaded = Forecaster.load(tmp_path / "f")
    of_pandas = kind not in ("polars", "enum")
    same = pd.testing.assert_frame_equal if of_pandas else lambda a, b: a.equals(b) or pytest.fail(f"{a} {b}")
    same(loaded.result(), expected)
    same(loaded.history(), forecaster.history())
    same(loaded.explain(), forecaster.explain())
    same(loaded.update(later), forecaster.update(later))


def test_damaged_and_other_files_are_refused(tmp_path):
    forecaster = Forecaster()
    forecaster.forecast(panel("a"), 1)
    forecaster.save(tmp_path / "f")
    whole = (tmp_path / "f").read_bytes()
    damaged = [whole[:end] for end in range(0, len(whole) - 1, 97)]
    for content in (*damaged, b"PK\x03\x04", b"\x80\x04K\x01.", b'{"format": 1}'):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(ValueError, match=r"expected a file of Forecaster\.save"):
            Forecaster.load(tmp_path / "f")


SHOPS, FUTURE = with_regressors()
BAD = {  # rows of a series that is bad, and what is said of it
    "text": (range(5), ["p", "q", "r", "s", "t"], "y: 'p' in row 72, counted from 0, at 0 is no number; .*no reading"),
    "equal times": ([1, 2, 2, 3], [1, 2, 3, 4], "ds: 2 stands twice, in rows 73 and 74"),
    "infinite": (range(5), [1, 2, np.inf, 3, 4], "y: inf in row 74, counted from 0, at 2 is no number; it is left out"),
    "all missing": (range(5), [None] * 5, "no reading"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_series_is_reported_and_the_others_are_forecast(name):
    stamps, values, reason = BAD[name]
    good = panel("ab", np.arange(36))
    bad = pd.DataFrame({"unique_id": "bad", "ds": stamps, "y": pd.Series(values, dtype=object)})
    forecaster = Forecaster()
    found = forecaster.forecast(pd.concat([good.astype({"y": object}), bad], ignore_index=True), 2)
    pd.testing.assert_frame_equal(found[found["unique_id"] != "bad"], Forecaster().forecast(good, 2))
    assert (found["unique_id"] == "bad").sum() == (2 if name == "infinite" else 0)
    assert [failure.id for failure in forecaster.failed] == ["bad"]
    assert re.search(reason, forecaster.failed[0].reason)
    if name != "infinite":
        with pytest.raises(ValueError, match=r"stands twice|no reading"):
            Forecaster().forecast(bad.drop(columns="unique_id"), 2)


def test_one_cell_of_text_makes_no_text_of_the_numbers_beside_it():
    """As pandas reads such a column: all of its cells are text."""
    df, written = panel("ab"), panel("ab").astype({"y": str})
    df.loc[5, "y"], written.loc[5, "y"] = np.nan, "closed"
    forecaster = Forecaster()
    pd.testing.assert_frame_equal(forecaster.forecast(written.astype({"y": object}), 2), Forecaster().forecast(df, 2))
    said = "y: 'closed' in row 5, counted from 0, at 2020-06-30 is no number; it is left out"
    assert forecaster.failed == [("a", said)]
    assert forecaster.forecast(panel("a").assign(y=[" 1.5", *["-2e1"] * 34, "nan"]), 1, level=None) is not None
    assert [failure.reason.split(" in ")[0] for failure in forecaster.failed] == ["y: 'nan'"]


def test_one_reading_has_steps_among_other_series_or_numbers():
    short = pd.DataFrame({"unique_id": "s", "ds": MONTHS[:1], "y": [3.0]})
    forecaster = Forecaster()
    found = forecaster.forecast(pd.concat([panel(), short]), 2).set_index("unique_id").loc["s"]
    assert found["ds"].tolist() == [pd.Timestamp("2020-02-29"), pd.Timestamp("2020-03-31")]
    with pytest.raises(ValueError, match="one reading, at 2020-01-31: it does not tell the length of a step"):
        forecaster.forecast(short, 2)
    assert forecaster.forecast(short.assign(ds=5), 2)["ds"].tolist() == [6, 7]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"h": 0}, "h: got 0"),
        ({"h": True}, "h: got True"),
        ({"h": 1.5}, "h: got 1.5"),
        ({"h": "3 moons"}, "h: got '3 moons'"),
        ({"h": "0.5M"}, "a whole number of months"),
        ({"h": "24h"}, "h: got '24h', expected at least one step of the series, 1 month"),
        ({"level": [0]}, "level: got 0"),
        ({"level": [100]}, "level: got 100"),
        ({"level": ["90"]}, "level: got '90'"),
        ({"quantiles": [1.0]}, "quantiles: got 1.0"),
        ({"df": panel().drop(columns="y")}, "expected a column 'y'"),
        ({"df": panel()[:0]}, "a table without rows"),
        ({"df": panel().assign(ds="yesterday")}, "pandas.to_datetime"),
        ({"df": panel().assign(ds=pd.NaT)}, "ds: got NaT in row 0"),
        ({"df": panel().drop(columns="unique_id")}, "there is no column 'unique_id', so all rows are one series"),
        ({"df": 7}, "df: got int"),
        ({"h": "300Y", "df": panel(stamps=MONTHS.as_unit("ns"))}, "h: got '3600 steps', expected stamps that dates"),
        ({"h": 10**6, "df": panel(stamps=MONTHS.as_unit("us"))}, "h: got '1000000 steps', expected stamps that dates"),
        ({"df": panel().rename(columns={"y": "rfa"})}, "expected a column 'y'"),
        ({"df": pd.DataFrame({"unique_id": [1, np.nan], "ds": [1, 2], "y": [1, 2]})}, "in row 1"),
        ({"df": SHOPS}, "X: got None, expected the future values of 'price', 'flag'"),
        ({"df": SHOPS, "X": FUTURE.assign(unique_id=[0, 0, 1, 1])}, "'price' is missing for unique_id 'a'"),
        ({"df": SHOPS, "X": FUTURE.drop(columns="flag")}, "a column 'flag'"),
        ({"X": FUTURE}, "None: df has no regressors"),
        ({"df": SHOPS.assign(price="high"), "X": FUTURE}, "price: got 'high' in row 0"),
    ],
)
def test_bad_arguments_are_named(arguments, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        Forecaster().forecast(**{"df": panel(), "h": 2, **arguments})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"target_col": "rfa"}, "^target_col: got 'rfa', expected a column with another name than those of results"),
        ({"target_col": "weight"}, "^target_col: got 'weight'"),
        ({"id_col": "member"}, "^id_col: got 'member'"),
        ({"time_col": "note"}, "^time_col: got 'note'"),
        ({"time_col": "rfa-lo-90"}, "^time_col: got 'rfa-lo-90'"),
        ({"id_col": "y"}, "expected three names"),
        *(({"season_length": bad}, "^season_length: got") for bad in ("12", -1, np.nan, True, [12])),
    ],
)
def test_bad_options_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        Forecaster(**arguments)


def test_methods_before_a_forecast_say_so():
    for call in (Forecaster().history, Forecaster().explain, Forecaster().result, lambda: Forecaster().save("f")):
        with pytest.raises(ValueError, match=r"expected forecast\(\) before"):
            call()


def test_ctrl_c_leaves_what_is_done(monkeypatch):
    def stopped(done, total):
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("rfa.forecasting.forecaster._BLOCK", 1)
    forecaster, df = Forecaster(), panel("abcd")
    with pytest.raises(KeyboardInterrupt):
        forecaster.forecast(df, 2, progress=stopped)
    expected = Forecaster().forecast(panel("a"), 2)
    pd.testing.assert_frame_equal(forecaster.result(), expected)
    assert [failure.id for failure in forecaster.failed] == [*"bcd"]
    counts = []
    forecaster.forecast(df, 2, progress=lambda *each: counts.append(each))
    assert counts == [(k, 4) for k in (1, 2, 3, 4)]


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_polars_gives_the_same_as_pandas(zone):
    pl = pytest.importorskip("polars")
    df = panel("ab", pd.date_range("2024-03-01", periods=30, tz=zone).as_unit("us"))
    polars = pl.from_pandas(df).with_columns(pl.col("unique_id").cast(pl.Categorical))
    of_pandas, of_polars = Forecaster(), Forecaster()
    for call in (lambda f, x: f.forecast(x, 3), lambda f, x: f.cross_validation(x, 2), lambda f, x: f.history()):
        expected, found = call(of_pandas, df), call(of_polars, polars)
        assert found.schema["unique_id"] == pl.Categorical
        assert found.schema["ds"] == polars.schema["ds"]
        assert found.drop("unique_id").rows() == pl.from_pandas(expected.drop(columns="unique_id")).rows()
    days = polars.with_columns(pl.col("ds").dt.date())
    assert Forecaster().forecast(days, 2).schema["ds"] == pl.Date
