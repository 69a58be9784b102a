// One member: a family of models on one scale. A lattice of parameters is climbed by penalised likelihood, and the
// best point is kept.
#pragma once
#include "lags.h"
#include "profile.h"

namespace rfa {

// A point of the lattice.
struct Point {
  std::array<int, 4> at{};
  Model model;
  double prior = 0, evidence = 0;
  double score() const { return evidence + prior; }
};

enum class Family { LEVEL, DRIFT, DAMPED, AUTOREGRESSION, CYCLE, LAGS, CHANGES };

struct Member {
  const Given& g;
  const Basis& basis;
  const Scaled& scaled;
  const Origins& origins;
  Family family;
  bool robust;
  std::vector<Point> points;
  size_t best = 0;

  // What the best point says.
  std::vector<Forecast> rolling, ahead;  // of each target of each origin
  std::vector<double> one_step, weight;  // of each row; the weight as the filter gave it
  Season season;                         // where it has one
  Archive last;                          // the filter after the last reading
  Lags lags;                             // in the place of a filter

  Member(const Given& given, const Basis& b, const Scaled& s, const Origins& o, Family f, bool is_robust)
      : g(given), basis(b), scaled(s), origins(o), family(f), robust(is_robust) {}

  bool seasonal() const { return basis.season && !scaled.adjusted(); }

  std::array<int, 4> sizes() const {
    const int seasons = seasonal() ? int(SEASON_GAINS.size()) + 1 : 1;
    switch (family) {
      case Family::LEVEL: return {int(LEVEL_GAINS.size()), 1, 1, seasons};
      case Family::DRIFT: return {int(LEVEL_GAINS.size()), 1, 1, seasons};
      case Family::DAMPED: return {int(LEVEL_GAINS.size()), int(SLOPE_GAINS.size()), int(DAMPINGS.size()), seasons};
      case Family::CYCLE: return {int(SLOW_GAINS.size()), int(SHARES.size()), int(CYCLE_MEMORIES.size()), CYCLES};
      default: return {int(SLOW_GAINS.size()), int(SHARES.size()), int(MEMORIES.size()), seasons};
    }
  }

  std::array<int, 4> start() const {
    const int season = seasonal() ? 2 : 0;
    switch (family) {
      case Family::LEVEL: return {LEVEL_START, 0, 0, season};
      case Family::DRIFT: return {LEVEL_START, 0, 0, season};
      case Family::DAMPED: return {LEVEL_START, SLOPE_START, DAMPING_START, season};
      case Family::CYCLE: return {CYCLE_SLOW_START, SHARE_START, CYCLE_MEMORY_START, CYCLES / 2};
      default: return {SLOW_START, SHARE_START, MEMORY_START, season};
    }
  }

  // A drift does not decay away before the end of a long series.
  double drift_damping() const {
    const double span = std::max(g.times[g.rows - 1] - g.times[0], 1.0);
    return std::max(DRIFT_DAMPING, std::exp(-DRIFT_DECAY / span));
  }

  static double bell(int at, double centre, double width) {
    return -0.5 * (at - centre) * (at - centre) / (width * width);
  }

  // The model of a point, and its prior.
  Point point(std::array<int, 4> at) const {
    Point p;
    p.at = at;
    Model& m = p.model;
    const bool memory = family == Family::AUTOREGRESSION || family == Family::CYCLE;
    const double gain = memory ? SLOW_GAINS[at[0]] : LEVEL_GAINS[at[0]];
    m.level_noise = gain * gain / (1 - gain), m.scale = 1 / (1 - gain);
    m.damping = 0, m.slope_noise = 0;
    if (family == Family::DRIFT) m.damping = drift_damping();
    if (family == Family::LEVEL || family == Family::DRIFT) p.prior += bell(at[0], LEVEL_START, LEVEL_WIDTH);
    if (family == Family::DAMPED) {
      const double slope = gain * SLOPE_GAINS[at[1]];
      m.slope_noise = slope * slope / (1 - gain), m.damping = DAMPINGS[at[2]];
      p.prior += bell(at[0], LEVEL_START, LEVEL_WIDTH) + bell(at[1], SLOPE_START, SLOPE_WIDTH) +
                 bell(at[2], DAMPING_START, DAMPING_WIDTH);
    }
    if (memory) {
      m.memory = family == Family::CYCLE ? CYCLE_MEMORIES[at[2]] : MEMORIES[at[2]], m.damping = drift_damping();
      if (family == Family::CYCLE) m.turn = 2 * M_PI / (CYCLE_SHORTEST * std::pow(CYCLE_RATIO, at[3]));
      m.memory_noise = SHARES[at[1]] * (1 - m.memory * m.memory);
      m.scale += m.memory_noise, m.level_noise *= m.scale;
      p.prior += bell(at[0], SLOW_START, SLOW_WIDTH) + bell(at[1], SHARE_START, SHARE_WIDTH) +
                 bell(at[2], MEMORY_START, MEMORY_WIDTH);
    }
    m.season = at[3] > 0 && family != Family::CYCLE;
    if (m.season) {
      const double s = SEASON_GAINS[at[3] - 1] / g.period;
      m.season_noise = s * s * m.scale;
      p.prior += bell(at[3], SEASON_START, SEASON_WIDTH) - SEASON_COST * basis.season;
    }
    return p;
  }

  template <int N> Filter<N> filter(const Model& m, int size) const {
    constexpr int C = Filter<N>::C;
    Filter<N> f(m, size, robust);
    State<N>& s = f.state;
    const double variance = scaled.step * scaled.step / m.scale;
    auto set = [&](int i, double sd) { s.p[i * C + i] = sd * sd / variance; };
    s.x[0] = scaled.level, set(0, START_LEVEL * scaled.level_spread);
    if (m.damping > 0) set(1, (family == Family::DAMPED ? START_SLOPE : START_DRIFT) * scaled.slope);
    const int base = m.base();
    for (int i = 2; i < base; i++) s.p[i * C + i] = m.memory_noise / (1 - m.memory * m.memory);
    const int waves = m.season ? basis.season : 0;
    for (int j = 0; j < waves; j++)
      s.x[base + j] = scaled.coefficients[j],
                 set(base + j, START_SEASON * scaled.season / std::sqrt(double(basis.season)));
    for (int j = base + waves; j < f.n(); j++) set(j, START_REGRESSOR * (scaled.level_spread + scaled.slope));
    s.degrees = START_DEGREES, s.squares = variance * s.degrees;
    return f;
  }

  int states(const Model& m) const { return m.base() + int(g.regressors) + (m.season ? basis.season : 0); }

  const double* row(const Model& m, int64_t t) const {
    return &basis.rows[t * basis.width] + (m.season ? 0 : basis.season);
  }
  const double* row_ahead(const Model& m, int64_t k) const {
    return &basis.ahead[k * basis.width] + (m.season ? 0 : basis.season);
  }

  template <int N> double season_at(const Filter<N>& f, const double* z) const {
    double sum = 0;
    for (int j = 0; j < basis.season; j++) sum += f.state.x[f.model.base() + j] * z[j];
    return scaled.logarithmic ? Season::from_log(sum) : sum;
  }

  double evidence(const Model& m) const {
    return with_states(states(m), [&](auto n) {
      Filter<n()> f = filter<n()>(m, states(m));
      double before = g.times[0];
      for (int64_t t = 0; t < g.rows; t++) {
        if (std::isnan(scaled.y[t])) continue;
        f.predict(g.times[t] - before), before = g.times[t];
        f.update(row(m, t), scaled.y[t]);
      }
      return f.evidence;
    });
  }

  // With the best point: forecasts, and what is carried on.
  void run() {
    const Model& m = points[best].model;
    with_states(states(m), [&](auto n) { run<n()>(m); });
  }

  template <int N> void run(const Model& m) {
    Filter<N> f = filter<N>(m, states(m));
    std::vector<Filter<N>> kept;
    one_step.assign(size_t(g.rows), std::numeric_limits<double>::quiet_NaN()), weight.assign(size_t(g.rows), 1);
    season.added = !scaled.logarithmic;
    if (m.season) season.rows.assign(size_t(g.rows), 0);
    double before = -1;
    for (int64_t t = 0, origin = 0; t < g.rows; t++) {
      if (m.season) season.rows[t] = season_at(f, row(m, t));
      if (std::isnan(scaled.y[t])) continue;
      f.predict(f.readings ? g.times[t] - before : 0), before = g.times[t];
      if (f.readings) one_step[t] = f.value(row(m, t));
      weight[t] = f.update(row(m, t), scaled.y[t]).weight;
      if (origin < int64_t(origins.at.size()) && origins.at[origin] == t) kept.push_back(f), origin++;
    }
    for (size_t o = 0; o < kept.size(); o++)
      for (int64_t t : origins.targets[o]) {
        rolling.push_back(kept[o].forecast(Lag(m, g.times[t] - g.times[origins.at[o]]), row(m, t)));
        if (m.season) season.rolling.push_back(season_at(kept[o], row(m, t)));
      }
    for (int64_t k = 0; k < g.ahead; k++) {
      ahead.push_back(f.forecast(Lag(m, g.ahead_times[k] - before), row_ahead(m, k)));
      if (k) ahead[k].variance = std::max(ahead[k].variance, ahead[k - 1].variance);
      if (m.season) season.ahead.push_back(season_at(f, row_ahead(m, k)));
    }
    if (m.season) {  // rows before the first origin take the season that is known there
      const Filter<N>& first = kept.empty() ? f : kept[0];
      for (int64_t t = 0; t < (kept.empty() ? g.rows : origins.at[0]); t++)
        season.rows[t] = season_at(first, row(m, t));
    }
    last.pass(f);
  }

  size_t visit(std::array<int, 4> at) {
    for (size_t i = 0; i < points.size(); i++)
      if (points[i].at == at) return i;
    points.push_back(point(at));
    points.back().evidence = evidence(points.back().model);
    return points.size() - 1;
  }

  void fit() {
    const std::array<int, 4> size = sizes();
    best = visit(start());
    for (int cycle = 0; family == Family::CYCLE && cycle < CYCLES; cycle += 2) {
      std::array<int, 4> other = points[best].at;
      other[3] = cycle;
      const size_t next = visit(other);
      if (points[next].score() > points[best].score()) best = next;
    }
    if (seasonal() && family != Family::CYCLE) {
      std::array<int, 4> off = points[best].at;
      off[3] = 0;
      const size_t other = visit(off);
      if (points[other].score() > points[best].score()) best = other;
    }
    for (bool moved = true; moved && points.size() < size_t(MOST_POINTS);) {
      moved = false;
      for (int axis = 3; axis >= 0; axis--)
        for (int direction : {-1, 1})
          for (;;) {
            std::array<int, 4> at = points[best].at;
            at[axis] += direction;
            if (at[axis] < 0 || at[axis] >= size[axis] || points.size() >= size_t(MOST_POINTS)) break;
            const size_t next = visit(at);
            if (!(points[next].score() > points[best].score())) break;
            best = next, moved = true;
          }
    }
    run();
  }

  bool is_filter() const { return family != Family::LAGS && family != Family::CHANGES; }

  static int64_t place(const Given& g, double time) { return std::llround(time - g.times[0]); }

  // Rows that are missing, or that `filter` refuses, are filled with what is expected there.
  void fit_lags(const Member& filter) {
    lags.changes = family == Family::CHANGES;
    const size_t count = size_t(place(g, g.times[origins.last]) + 1);
    std::vector<double> values(count, 0.0);
    std::vector<char> known(count, 0);
    for (int64_t t = 0, at = 0; t <= origins.last; t++) {
      for (const int64_t now = place(g, g.times[t]); at < now; at++)
        if (at && !known[size_t(at)]) values[size_t(at)] = values[size_t(at) - 1];
      if (std::isnan(scaled.y[t])) continue;
      known[size_t(at)] = !(filter.weight[t] < REFUSED) || std::isnan(filter.one_step[t]);
      values[size_t(at)] = known[size_t(at)] ? scaled.y[t] : scaled.from(filter.scaled.row(filter.one_step[t], t), t);
      if (!std::isfinite(values[size_t(at)])) values[size_t(at)] = scaled.y[t];
    }
    for (size_t o = 0; o < origins.at.size(); o++) {
      Lags then = fitted(values, known, place(g, g.times[origins.at[o]]) + 1);
      const std::vector<int64_t>& rows = origins.targets[o];
      const std::vector<Forecast> path = then.path(place(g, g.times[rows.back()]) - place(g, g.times[origins.at[o]]));
      for (int64_t t : rows)
        rolling.push_back(path[size_t(place(g, g.times[t]) - place(g, g.times[origins.at[o]]) - 1)]);
    }
    std::vector<double> expected(count);
    lags = fitted(values, known, int64_t(count), &expected);
    const std::vector<Forecast> path = lags.path(place(g, g.ahead_times[g.ahead - 1]) - int64_t(count) + 1);
    for (int64_t k = 0; k < g.ahead; k++) ahead.push_back(path[size_t(place(g, g.ahead_times[k]) - int64_t(count))]);
    lags.pass(last);
    weight = filter.weight, one_step.assign(size_t(g.rows), std::numeric_limits<double>::quiet_NaN());
    for (int64_t t = 0; t <= origins.last; t++)
      if (!std::isnan(scaled.y[t])) one_step[t] = expected[size_t(place(g, g.times[t]))];
  }

  // To the first values. `expected` gets what each one was forecast to be.
  Lags fitted(const std::vector<double>& values, const std::vector<char>& known, int64_t count,
              std::vector<double>* expected = nullptr) const {
    Lags found = lags;
    found.fit(values.data(), count);
    const int64_t start = expected ? 0 : std::max<int64_t>(count - MOST_LAG_ROWS, 0);
    const int64_t first = start + int64_t(found.recent.size());
    if (!expected && std::find(known.begin() + first, known.begin() + count, 0) == known.begin() + count) return found;
    for (size_t j = 0; j < found.recent.size(); j++) found.recent[j] = values[size_t(first - 1) - j];
    if (expected) std::fill(expected->begin(), expected->begin() + first, std::numeric_limits<double>::quiet_NaN());
    for (int64_t t = first; t < count; t++) {
      const double next = found.next();
      if (expected) (*expected)[size_t(t)] = next;
      found.join(known[size_t(t)] ? values[size_t(t)] : next);
    }
    return found;
  }
};

}  // namespace rfa
