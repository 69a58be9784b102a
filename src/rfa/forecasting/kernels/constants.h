// All numbers that were chosen, each with its source. "Development data": M1 and tourism (/docs/record/forecasts.md).
#pragma once
#include <array>
#include <limits>

namespace rfa {

constexpr int MOST_STATES = 40;               // level, slope and coefficients

// Scales of a reading's error, as multiples of the variance of its prediction; how many readings the prior counts for.
constexpr int SCALES = 6;
constexpr std::array<double, SCALES> SCALE = {1, 5, 25, 250, 2500, 25000};  // the last grows with the reading
constexpr std::array<double, SCALES> SCALE_COUNTS = {9.2, 0.5, 0.15, 0.07, 0.05, 0.03};
constexpr double REFUSED = 0.1;               // a reading of smaller weight starts a challenger (robust.cpp)
constexpr double CHALLENGER_ODDS = -7;        // log odds of a new challenger (robust.cpp)
constexpr int TRUSTED = 2;                    // readings that a new challenger uses with weight 1 (robust.cpp)
constexpr double NEW_VARIANCE = 4;             // factor of the error's variance in a new challenger
constexpr double ABANDONED_ODDS = -9;         // a challenger with smaller odds is given up (robust.cpp)
constexpr double SAME_ODDS = 0.05;            // change in odds by which filter and challenger are the same (robust.cpp)
constexpr double NO_CHALLENGER = -std::numeric_limits<double>::infinity();
constexpr double MOST_DEGREES = 25;           // readings after which older ones count less for the variance of the error


// Series
constexpr double SPREAD_PART = 0.25, SPREAD_NORMAL = 0.3186;  // spreads are this quantile of absolute values, over a normal one's
constexpr double SEASON_SPAN = 1.6;           // periods that a season needs
constexpr int MOST_WAVES = 6;
constexpr int CYCLE_READINGS = 50;              // fewer have no cycle
constexpr int FEW_READINGS = 4;               // fewer have a level only, with at least this spread in units of it
constexpr double FEW_SPREAD = 0.2;
constexpr double LEAST_STEP = 1e-8;            // spread of changes of a constant series, in units of its level
constexpr double SEASON_START_PERIODS = 10, SEASON_START_SHRINK = 2, SEASON_START_BOUND = 3;  // first periods; readings that a median of 0 counts for
constexpr int START_WINDOW = 5;               // readings whose median is the level before the first one
constexpr int MOST_PERIOD_WINDOW = 60;
constexpr double MOST_LOG = 700, MOST_SEASON = 7;
constexpr int MOST_MEMBERS = 16;

constexpr int FIRST_ORIGIN = 4, MOST_ORIGINS = 16, MOST_TARGETS = 24, ORIGIN_HORIZONS = 5;

// Start: spreads in units of the series' own
constexpr double START_LEVEL = 2, START_SLOPE = 0.5, START_DRIFT = 1, START_SEASON = 0.5, START_REGRESSOR = 3;
constexpr double START_DEGREES = 2;           // readings that the spread of one-step changes counts for

// Lattices of parameters, as gains of exponential smoothing; where a search starts; widths of priors in steps of the lattice
constexpr std::array<double, 10> LEVEL_GAINS = {0.02, 0.06, 0.12, 0.2, 0.3, 0.42, 0.56, 0.7, 0.85, 0.96};
constexpr std::array<double, 5> SLOPE_GAINS = {0, 0.03, 0.1, 0.25, 0.5};
constexpr std::array<double, 5> DAMPINGS = {0.7, 0.8, 0.88, 0.94, 0.98};
constexpr std::array<double, 4> SLOW_GAINS = {0, 0.02, 0.06, 0.15};
constexpr std::array<double, 4> SHARES = {0.5, 2, 8, 40};      // variance of the autoregression over the error's
constexpr std::array<double, 6> MEMORIES = {0.3, 0.5, 0.7, 0.82, 0.9, 0.95};
constexpr std::array<double, 5> SEASON_GAINS = {0, 0.05, 0.15, 0.3, 0.5};
constexpr int LEVEL_START = 5, SLOPE_START = 2, DAMPING_START = 4, SLOW_START = 3, SHARE_START = 2, MEMORY_START = 3, SEASON_START = 2;
constexpr double LEVEL_WIDTH = 4, SLOPE_WIDTH = 1.5, DAMPING_WIDTH = 1.5, SLOW_WIDTH = 2, SHARE_WIDTH = 2, MEMORY_WIDTH = 2, SEASON_WIDTH = 2;
constexpr double SEASON_COST = 0.3;             // log prior of each wave of a season
constexpr double DRIFT_DAMPING = 0.997;
constexpr std::array<double, 5> CYCLE_MEMORIES = {0.7, 0.82, 0.9, 0.95, 0.98};
constexpr int CYCLES = 18, CYCLE_SLOW_START = 1, CYCLE_MEMORY_START = 2;
constexpr double CYCLE_SHORTEST = 3.2, CYCLE_RATIO = 1.17;      // periods in steps: the shortest, and from one to the next
constexpr int MOST_POINTS = 40;

// Combination
constexpr double MOST_ERROR = 4, LEAST_ERROR = 0.05;  // bounds of an error, in medians of all errors
constexpr double WEIGHT_POWER = 5, WEIGHT_ORIGINS = 5;  // weight = error^-power; origins by which the power is halved
constexpr double BAND_PRIOR = 10, BAND_FACTOR = 1.2;   // origins that the prior of the bands counts for; its factor
constexpr double BAND_DEGREES = 6;                    // Student-t
constexpr double BAND_NORMAL = 1.6449;                // 90 %
constexpr double MOST_STANDARD = 5;                   // bound of a standardised error

}  // namespace rfa
