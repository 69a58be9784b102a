// One series as the members see it: on one scale, with the waves of its season, its start, and its rolling origins.
#pragma once
#include <limits>

#include "filter.h"

namespace rfa {

inline double quantile(std::vector<double> x, double p) {  // of a copy; NaN where there is none
  if (x.empty()) return std::numeric_limits<double>::quiet_NaN();
  const double at = p * double(x.size() - 1);
  const size_t low = size_t(at), high = std::min(low + 1, x.size() - 1);
  std::nth_element(x.begin(), x.begin() + low, x.end());
  const double first = x[low];
  if (high == low) return first;
  return first + (at - double(low)) * (*std::min_element(x.begin() + high, x.end()) - first);
}

inline double median(std::vector<double> x) { return quantile(std::move(x), 0.5); }

// The spread of values about 0, as a standard deviation; the mean of absolute values where more than half are 0.
inline double spread(std::vector<double> x) {
  if (x.empty()) return 0;
  double sum = 0;
  for (double& v : x) v = std::abs(v), sum += v;
  const double part = quantile(x, SPREAD_PART);
  if (part > 0) return part / SPREAD_NORMAL;
  for (double& v : x) v = std::min(v, 3 * sum / double(x.size()));
  double bounded = 0;
  for (double v : x) bounded += v;
  return 1.25 * bounded / double(x.size());
}

// What Python hands over of one series.
struct Given {
  int64_t rows, ahead, regressors;
  double period, second;  // of the season, and of a further one
  const double *times, *values, *x, *ahead_times, *ahead_x;
};

// The waves of a season, and the regressors: z(t) of every row and of the times ahead.
struct Basis {
  int season = 0, width = 0;  // waves first
  std::vector<double> rows, ahead;

  // Of rows to come, whose season is known.
  Basis(const Given& g, int of_season, double period) : season(of_season), width(of_season) {
    rows.resize(size_t(g.rows * width)), ahead.resize(size_t(g.ahead * width));
    for (int64_t t = 0; t < g.rows && width; t++) waves_at(period, g.times[t], &rows[t * width]);
    for (int64_t t = 0; t < g.ahead && width; t++) waves_at(period, g.ahead_times[t], &ahead[t * width]);
  }

  Basis(const Given& g, const std::vector<int64_t>& read) {
    const double span = read.size() ? g.times[read.back()] - g.times[read.front()] : 0;
    if (g.period >= 2 && span >= SEASON_SPAN * g.period &&
        double(read.size()) >= SEASON_SPAN * std::min(g.period, 2.0 * MOST_WAVES)) {
      const int waves = std::min(int(g.period / 2), MOST_WAVES);
      season = 2 * waves - (waves == g.period / 2);
    }
    width = season + int(g.regressors);
    rows.resize(size_t(g.rows * width)), ahead.resize(size_t(g.ahead * width));
    for (int64_t t = 0; t < g.rows; t++) waves_at(g.period, g.times[t], &rows[t * width]);
    for (int64_t t = 0; t < g.ahead; t++) waves_at(g.period, g.ahead_times[t], &ahead[t * width]);
    for (int64_t k = 0; k < g.regressors; k++) regressor(g, read, k);
  }

  void waves_at(double period, double time, double* z) const {
    const double phase = 2 * M_PI * std::fmod(time, period > 0 ? period : 1) / period;
    for (int j = 0; j < season; j++) {
      const int wave = j / 2 + 1;
      if (2 * wave == period) z[j] = std::cos(wave * phase);
      else z[j] = M_SQRT2 * (j % 2 ? std::sin(wave * phase) : std::cos(wave * phase));
    }
  }

  // With mean 0 and spread 1 over the readings.
  void regressor(const Given& g, const std::vector<int64_t>& read, int64_t k) {
    double mean = 0, square = 0;
    for (int64_t t : read) mean += g.x[t * g.regressors + k] / double(read.size());
    for (int64_t t : read) square += std::pow(g.x[t * g.regressors + k] - mean, 2) / double(read.size());
    const double unit = square > 0 ? 1 / std::sqrt(square) : 0;
    for (int64_t t = 0; t < g.rows; t++) rows[t * width + season + k] = (g.x[t * g.regressors + k] - mean) * unit;
    for (int64_t t = 0; t < g.ahead; t++)
      ahead[t * width + season + k] = (g.ahead_x[t * g.regressors + k] - mean) * unit;
  }
};

// Origins of rolling forecasts, as rows, and the rows that each forecasts.
struct Origins {
  int64_t last = 0;  // the last reading
  std::vector<int64_t> at;
  std::vector<std::vector<int64_t>> targets;

  Origins(const Given& g, const std::vector<int64_t>& read) {
    const int64_t n = int64_t(read.size());
    last = read.back();
    const double furthest = g.ahead ? g.ahead_times[g.ahead - 1] - g.times[read.back()] : 1;
    const int64_t steps = std::clamp<int64_t>(g.ahead, 1, MOST_TARGETS);
    const int64_t first =
        std::max<int64_t>(std::min<int64_t>(n / 2, FIRST_ORIGIN + int64_t(std::min(g.period, double(n)))),
                          n - ORIGIN_HORIZONS * std::max<int64_t>(g.ahead, 2) - 2);
    const int64_t count = n - 1 - first;
    const int64_t kept = std::min<int64_t>(count, MOST_ORIGINS);
    for (int64_t i = 0; i < kept; i++) {
      const int64_t origin = first + (kept > 1 ? (i * (count - 1)) / (kept - 1) : count - 1);
      if (origin < 2) continue;
      int64_t end = origin;
      while (end + 1 < n && end < origin + g.ahead &&
             g.times[read[end + 1]] - g.times[read[origin]] <= furthest * (1 + 1e-9))
        end++;
      std::vector<int64_t> rows;
      for (int64_t k = 0; k < std::min(steps, end - origin); k++)
        rows.push_back(read[origin + ((k + 1) * (end - origin)) / std::min(steps, end - origin)]);
      if (rows.empty()) continue;
      at.push_back(read[origin]), targets.push_back(rows);
    }
  }
};

// A season: a factor, or what is added, of each row, as it was expected before, of each target of each origin, and of
// the times ahead.
struct Season {
  bool added = false;
  std::vector<double> rows, rolling, ahead;

  static double from_log(double v) { return std::exp(std::clamp(v, -MOST_SEASON, MOST_SEASON)); }
  double with(double value, double season) const { return added ? value + season : value * season; }
  double without(double value, double season) const { return added ? value - season : value / season; }

  // Whether there is one that can be taken away.
  bool usable() const {
    auto finite = [](const std::vector<double>& v) {
      return std::all_of(v.begin(), v.end(), [](double x) { return std::isfinite(x); });
    };
    return !rows.empty() && finite(rows) && finite(rolling) && finite(ahead);
  }
};

// On one scale: values without the season given, if there is one, and what is assumed of the start.
struct Scaled {
  bool logarithmic;
  Season known;
  std::vector<double> y, coefficients;
  double level = 0, level_spread = 1, step = 1, slope = 1, season = 0;  // step: the spread of one-step changes

  Scaled(const Given& g, const std::vector<int64_t>& read, const Basis& basis, bool is_logarithmic, Season of = {})
      : logarithmic(is_logarithmic), known(std::move(of)), y(size_t(g.rows)) {
    for (int64_t t = 0; t < g.rows; t++) y[t] = from(g.values[t], t);
    std::vector<double> first, changes, yearly;
    const int64_t window = std::max<int64_t>(START_WINDOW, int64_t(std::min(g.period, double(MOST_PERIOD_WINDOW))));
    for (int64_t i = 0; i < std::min<int64_t>(window, int64_t(read.size())); i++) first.push_back(y[read[i]]);
    level = median(first);
    for (size_t i = 1; i < read.size(); i++)
      changes.push_back((y[read[i]] - y[read[i - 1]]) /
                        std::sqrt(std::max(g.times[read[i]] - g.times[read[i - 1]], 1.0)));
    if (g.period >= 2)
      for (size_t i = 0, j = 0; i < read.size(); i++) {
        while (j < read.size() && g.times[read[j]] < g.times[read[i]] + g.period - 0.5) j++;
        if (j < read.size() && g.times[read[j]] < g.times[read[i]] + g.period + 0.5)
          yearly.push_back(y[read[j]] - y[read[i]]);
      }
    slope = spread(changes);
    step = yearly.size() >= 4 ? std::min(slope, std::max(spread(yearly), LEAST_YEARLY * slope)) : slope;
    const double rounding = ROUNDING * (logarithmic ? std::max(std::abs(level), 1.0) : std::abs(level));
    step = step > rounding ? step : 0, slope = slope > rounding ? slope : 0;
    for (double& v : first) v -= level;
    level_spread = std::max(spread(first), slope);
    if (int64_t(read.size()) < FEW_READINGS)
      slope = step = level_spread = std::max(level_spread, FEW_SPREAD * std::abs(level));
    season = slope;
    if (!(step > 0)) step = std::max(slope, LEAST_STEP * std::max(std::abs(level), 1e-3));
    if (!(slope > 0)) slope = season = level_spread = step;
    if (basis.season && !adjusted()) season_start(g, read, basis);
  }

  // The season's coefficients before the first reading: medians, over the first periods, of the distance of each phase
  // from the median of the period around it. A wrong reading in a first year does not decide what the filter expects.
  void season_start(const Given& g, const std::vector<int64_t>& read, const Basis& basis) {
    const int bins = g.period <= 2 * MOST_WAVES ? int(g.period) : 2 * MOST_WAVES;
    std::vector<std::vector<double>> of(static_cast<size_t>(bins));
    const double half = g.period / 2, first = g.times[read.front()], last = g.times[read.back()];
    size_t low = 0, high = 0;
    for (size_t i = 0; i < read.size(); i++) {
      const double time = g.times[read[i]];
      while (g.times[read[low]] < time - half - 1e-9) low++;
      while (high < read.size() && g.times[read[high]] <= time + half + 1e-9) high++;
      if (time < first + half - 1 || time > last - half + 1 || time > first + SEASON_START_PERIODS * g.period) continue;
      std::vector<double> around;
      for (size_t j = low; j < high; j++) around.push_back(y[read[j]]);
      const double phase = std::fmod(std::fmod(time, g.period) + g.period, g.period) / g.period;
      of[std::min(size_t(phase * bins + 1e-6), size_t(bins - 1))].push_back(y[read[i]] - median(around));
    }
    std::vector<double> all;
    for (const std::vector<double>& one : of) all.insert(all.end(), one.begin(), one.end());
    const double bound = SEASON_START_BOUND * spread(all);
    for (std::vector<double>& one : of)
      for (double& v : one) v = std::clamp(v, -bound, bound);
    std::vector<double> z(static_cast<size_t>(basis.season));
    coefficients.assign(size_t(basis.season), 0.0);
    const double offset = g.period == bins ? 0 : 0.5;  // the middle of a bin
    for (int b = 0; b < bins; b++) {
      basis.waves_at(g.period, (b + offset) * g.period / bins, z.data());
      if (of[b].empty()) continue;
      const double shrunk = double(of[b].size()) / (double(of[b].size()) + SEASON_START_SHRINK);
      for (int j = 0; j < basis.season; j++) coefficients[j] += z[j] * shrunk * median(of[b]) / bins;
    }
  }

  // A standard deviation ahead. On the logarithmic scale a band does not grow beyond all bounds.
  double deviation(double variance) const {
    return logarithmic ? std::min(std::sqrt(variance), MOST_LOG_SPREAD) : std::sqrt(variance);
  }

  bool adjusted() const { return !known.rows.empty(); }

  // A value of a row on this scale, and the value of what is on this scale.
  double from(double value, int64_t t) const {
    if (adjusted()) value = known.without(value, known.rows[size_t(t)]);
    return logarithmic ? std::log(value) : value;
  }
  double back(double v, double season) const {
    if (logarithmic) v = std::exp(std::min(v, MOST_LOG));
    return adjusted() ? known.with(v, season) : v;
  }
  double row(double v, int64_t t) const { return back(v, adjusted() ? known.rows[size_t(t)] : 0); }
};

}  // namespace rfa
