// All numbers that were chosen.
//
// Where no source is named, they were chosen on the 2,312 series of M1 and tourism (both, official splits), and the
// accuracy is flat around them: of forty that were halved or doubled, few change the geometric mean of the MASE by 1 %.
// engine.py repeats FEW_READINGS, SEASON_SPAN, REFUSED, MOST_STATES and MOST_WAVES.
#pragma once
#include <array>
#include <limits>

namespace rfa {

constexpr int MOST_STATES = 40;                    // level, slope, autoregression or cycle, and coefficients
constexpr int MOST_MEMBERS = 28;                   // room for them
constexpr double MOST_LOG = 700, MOST_SEASON = 7;  // of what is exponentiated

// Scales of a reading's error, as multiples of the variance of its prediction, and how many readings the prior of each
// counts for: the idea of noise_scale.h with fewer scales. The last scale grows with the reading.
constexpr int SCALES = 6;
constexpr std::array<double, SCALES> SCALE = {1, 5, 25, 250, 2500, 25000};
constexpr std::array<double, SCALES> SCALE_COUNTS = {9.2, 0.5, 0.15, 0.07, 0.05, 0.03};
// The share of errors of each scale that are no wrong readings: the level has moved, and the state follows.
constexpr std::array<double, SCALES> MOVED_SHARE = {1, 0.5, 0.1, 0, 0, 0};
constexpr double MOST_DEGREES = 25;  // readings after which older ones count less for the variance of the error

// Challengers, as in estimation/kernels/robust.h, where the odds are -7 and -9: here two wrong readings in a row are no jump yet
constexpr double REFUSED = 0.1;         // a reading of smaller weight starts one
constexpr double CHALLENGER_ODDS = -9;  // log odds of a new one
constexpr double ABANDONED_ODDS = -12;  // with smaller odds it is given up
constexpr double SAME_ODDS = 0.05;      // change in odds by which filter and challenger are the same
constexpr int TRUSTED = 2;              // readings that a new one uses with weight 1
constexpr double NEW_VARIANCE = 4;      // factor of the error's variance in a new one: what moves once moves again
constexpr double NO_CHALLENGER = -std::numeric_limits<double>::infinity();

// What a series must have
constexpr int FEW_READINGS = 4;  // fewer have a level only, with at least the spread FEW_SPREAD times that level
constexpr double FEW_SPREAD = 0.2;
constexpr int CYCLE_READINGS = 50;   // fewer have no cycle
constexpr double COUNTS = 0.3;       // share of zeros from which readings are counts: a level alone, and none is wrong
constexpr int LOG_READINGS = 7;      // fewer have no logarithmic scale: four points on a line would grow without end
constexpr double SEASON_SPAN = 1.6;  // periods that a season needs
constexpr int MOST_WAVES = 6;        // of a season

// Start. A spread is the lower quartile of absolute values over that of a normal one: a quarter of the readings may be
// wrong, and each of them spoils two changes.
constexpr double SPREAD_PART = 0.25, SPREAD_NORMAL = 0.3186;
constexpr double LEAST_STEP = 1e-8;  // spread of the changes of a constant series, in units of its level
constexpr double LEAST_YEARLY = 1e-5;  // spread of the changes over a period, in that of the changes
constexpr double ROUNDING = 1e-12;     // changes as small as that, in units of the level, are none
constexpr int START_WINDOW = 5;      // the level before the first reading is the median of so many, or of a period
constexpr int MOST_PERIOD_WINDOW = 60;
constexpr double START_LEVEL = 2, START_SLOPE = 0.5, START_DRIFT = 1, START_SEASON = 0.5, START_REGRESSOR = 3;
constexpr double START_DEGREES = 2;          // readings that the spread of changes counts for
constexpr double SEASON_START_PERIODS = 10;  // periods whose medians are the season before the first reading
constexpr double SEASON_START_SHRINK = 2;    // readings of 0 that join each median
constexpr double SEASON_START_BOUND = 3;     // bound of a distance from the level, in spreads

// Rolling origins: at least so many readings before the first (and a period); at most so many horizons before the end
constexpr int FIRST_ORIGIN = 4, MOST_ORIGINS = 16, MOST_TARGETS = 24, ORIGIN_HORIZONS = 5;

// Lattices of parameters: gains of exponential smoothing, factors of a slope, and shares of the error's variance
constexpr std::array<double, 10> LEVEL_GAINS = {0.02, 0.06, 0.12, 0.2, 0.3, 0.42, 0.56, 0.7, 0.85, 0.96};
constexpr std::array<double, 5> SLOPE_GAINS = {0, 0.03, 0.1, 0.25, 0.5};
constexpr std::array<double, 5> DAMPINGS = {0.7, 0.8, 0.88, 0.94, 0.98};
constexpr std::array<double, 4> SLOW_GAINS = {0, 0.02, 0.06, 0.15};  // of the level beside an autoregression
constexpr std::array<double, 4> SHARES = {0.5, 2, 8, 40};            // variance of the autoregression over the error's
constexpr std::array<double, 6> MEMORIES = {0.3, 0.5, 0.7, 0.82, 0.9, 0.95};
constexpr std::array<double, 5> CYCLE_MEMORIES = {0.7, 0.82, 0.9, 0.95, 0.98};
constexpr std::array<double, 5> SEASON_GAINS = {0, 0.05, 0.15, 0.3, 0.5};
constexpr double DRIFT_DAMPING = 0.997;  // of a drift: it halves in 230 steps
constexpr double DRIFT_DECAY = 0.1;      // least logarithm that a whole series leaves of a drift, negated
constexpr int CYCLES = 18;               // periods of a cycle, in steps:
constexpr double CYCLE_SHORTEST = 3.2, CYCLE_RATIO = 1.17;  // the shortest, and from one to the next
constexpr int MOST_POINTS = 40;                             // that a search visits

// Where a search starts, which is the middle of the prior, and the prior's width, in steps of the lattice
constexpr int LEVEL_START = 5, SLOPE_START = 2, DAMPING_START = 4, SEASON_START = 2;
constexpr int SLOW_START = 3, SHARE_START = 2, MEMORY_START = 3, CYCLE_SLOW_START = 1, CYCLE_MEMORY_START = 2;
constexpr double LEVEL_WIDTH = 4, SLOPE_WIDTH = 1.5, DAMPING_WIDTH = 1.5, SEASON_WIDTH = 2;
constexpr double SLOW_WIDTH = 2, SHARE_WIDTH = 2, MEMORY_WIDTH = 2;
constexpr double SEASON_COST = 0.3;  // of each wave, in the log prior: on noise, a season is found by chance

// Autoregressions of several lags. These and the free seasons were chosen on the 49 series of docs/record/forecasts.md
// too
constexpr int MOST_LAGS = 32;
constexpr int LAGS_READINGS = 40;    // fewer have none
constexpr int MOST_LAG_ROWS = 2000;  // the last steps, to which they are fitted
constexpr int MOST_PATH = 5000;      // steps ahead; beyond there are none
constexpr double LAGS_PART = 0.25;   // of the readings: the most lags
constexpr double DRIFT_SHRINK = 15;  // changes of 0 that join the mean change
constexpr double GRID_ROWS = 2.5;    // most steps for each reading

// Free seasons, of periods longer than the waves can follow
constexpr int MOST_BINS = 2100;                                      // of a period: a week of five minutes has 2,016
constexpr std::array<double, 3> PROFILE_GAINS = {0.05, 0.15, 0.35};  // of a phase; the one with the least error is used
constexpr std::array<double, 2> PROFILE_VISITS = {0.5, 1};           // readings of 0 that join a phase of each period
constexpr double PROFILE_LEVEL = 0.15;                               // gain of the level over a period
constexpr double PROFILE_BOUND = 3;                                  // of an error, in spreads
constexpr double PROFILE_READINGS = 5;                               // that the first spread counts for

// Combination: a weight is a power of the error at earlier origins
constexpr double MOST_ERROR = 4, LEAST_ERROR = 0.05;      // bounds of an error, in medians of all errors
constexpr double WEIGHT_POWER = 4.5, WEIGHT_ORIGINS = 5;  // the power with many origins; origins by which it is halved

// Bands
constexpr double BAND_PRIOR = 10, BAND_FACTOR = 1.2;  // origins that the prior counts for, and its factor
constexpr double BAND_DEGREES = 6;                    // of Student's t
constexpr double MOST_STANDARD = 5;                   // bound of a standardised error
constexpr double MOST_LOG_SPREAD = 1;                 // of a logarithm: a factor of 2.7
constexpr double BAND_NORMAL = 1.6449;                // of the 90 % band of readings, in standard deviations

}  // namespace rfa
