// One member: a family of models on one scale. A lattice of parameters is climbed by penalised likelihood, and the
// models on the way are averaged by it. Every origin weighs them by the readings before it.
#pragma once
#include "series.h"

namespace rfa {

struct Forecast { double mean = 0, variance = 0; };

// A point of the lattice, and what its model said.
struct Point {
  std::array<int, 4> at{};
  Model model;
  double prior = 0, evidence = 0;
  std::vector<double> until;         // evidence before each origin
  std::vector<Forecast> rolling;     // of each target of each origin
  std::vector<Forecast> ahead;
  std::vector<double> one_step;      // of each row
  std::vector<double> weight;        // of each row
  Factors factors;                   // of its season, where they are recorded
  bool record = false;
  std::vector<double> state;         // after the last row, written out
  double score() const { return evidence + prior; }
};

enum class Family { LEVEL, DRIFT, DAMPED, AUTOREGRESSION };

struct Member {
  const Given& g;
  const Basis& basis;
  const Scaled& scaled;
  const Origins& origins;
  Family family;
  bool robust;
  std::vector<Point> points;
  double slope_share = 1;

  // What the points say together.
  std::vector<Forecast> rolling, ahead;
  std::vector<double> one_step;
  size_t best = 0;

  Member(const Given& given, const Basis& b, const Scaled& s, const Origins& o, Family f, bool is_robust)
      : g(given), basis(b), scaled(s), origins(o), family(f), robust(is_robust) {}

  bool seasonal() const { return basis.season && !scaled.adjusted(); }

  std::array<int, 4> sizes() const {
    const int seasons = seasonal() ? int(SEASON_GAINS.size()) + 1 : 1;
    switch (family) {
      case Family::LEVEL: return {int(LEVEL_GAINS.size()), 1, 1, seasons};
      case Family::DRIFT: return {int(LEVEL_GAINS.size()), 1, 1, seasons};
      case Family::DAMPED: return {int(LEVEL_GAINS.size()), int(SLOPE_GAINS.size()), int(DAMPINGS.size()), seasons};
      default: return {int(SLOW_GAINS.size()), int(SHARES.size()), int(MEMORIES.size()), seasons};
    }
  }

  std::array<int, 4> start() const {
    const int season = seasonal() ? 2 : 0;
    switch (family) {
      case Family::LEVEL: return {LEVEL_START, 0, 0, season};
      case Family::DRIFT: return {LEVEL_START, 0, 0, season};
      case Family::DAMPED: return {LEVEL_START, SLOPE_START, DAMPING_START, season};
      default: return {SLOW_START, SHARE_START, MEMORY_START, season};
    }
  }

  static double bell(int at, double centre, double width) { return -0.5 * (at - centre) * (at - centre) / (width * width); }

  // The model of a point, and its prior.
  Point point(std::array<int, 4> at) const {
    Point p;
    p.at = at;
    Model& m = p.model;
    const double gain = family == Family::AUTOREGRESSION ? SLOW_GAINS[at[0]] : LEVEL_GAINS[at[0]];
    m.level_noise = gain * gain / (1 - gain), m.scale = 1 / (1 - gain);
    m.damping = 0, m.slope_noise = 0;
    if (family == Family::DRIFT) m.damping = DRIFT_DAMPING;
    if (family == Family::LEVEL || family == Family::DRIFT) p.prior += bell(at[0], LEVEL_START, LEVEL_WIDTH);
    if (family == Family::DAMPED) {
      const double slope = gain * SLOPE_GAINS[at[1]];
      m.slope_noise = slope * slope / (1 - gain), m.damping = DAMPINGS[at[2]];
      p.prior += bell(at[0], LEVEL_START, LEVEL_WIDTH) + bell(at[1], SLOPE_START, SLOPE_WIDTH) + bell(at[2], DAMPING_START, DAMPING_WIDTH);
    }
    if (family == Family::AUTOREGRESSION) {
      m.memory = MEMORIES[at[2]], m.damping = DRIFT_DAMPING;
      m.memory_noise = SHARES[at[1]] * (1 - m.memory * m.memory);
      m.scale += m.memory_noise, m.level_noise *= m.scale;
      p.prior += bell(at[0], SLOW_START, SLOW_WIDTH) + bell(at[1], SHARE_START, SHARE_WIDTH) + bell(at[2], MEMORY_START, MEMORY_WIDTH);
    }
    m.season = at[3] > 0;
    if (m.season) {
      const double s = SEASON_GAINS[at[3] - 1] / g.period;
      m.season_noise = s * s * m.scale;
      p.prior += bell(at[3], SEASON_START, SEASON_WIDTH);
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
    if (base > 2) s.p[2 * C + 2] = m.memory_noise / (1 - m.memory * m.memory);
    const int waves = m.season ? basis.season : 0;
    for (int j = 0; j < waves; j++) set(base + j, START_SEASON * scaled.season / std::sqrt(double(basis.season)));
    for (int j = base + waves; j < f.n(); j++) set(j, START_REGRESSOR * (scaled.level_spread + scaled.slope));
    s.degrees = START_DEGREES, s.squares = variance * s.degrees;
    return f;
  }

  template <int N> void run(Point& p, int size) const {
    Filter<N> f = filter<N>(p.model, size);
    static thread_local std::vector<Filter<N>> kept;
    kept.clear();
    const int skip = p.model.season ? 0 : basis.season;
    size_t origin = 0;
    double before = g.times[0];
    bool started = false;
    p.one_step.assign(size_t(g.rows), std::numeric_limits<double>::quiet_NaN()), p.weight.assign(size_t(g.rows), 1);
    for (int64_t t = 0; t < g.rows; t++) {
      if (std::isnan(scaled.y[t])) continue;
      const double* z = &basis.rows[t * basis.width] + skip;
      f.predict(started ? g.times[t] - before : 0);
      before = g.times[t];
      if (started) p.one_step[t] = f.value(z);
      if (p.record) p.factors.rows[t] = season_factor(f, &basis.rows[t * basis.width]);
      started = true;
      p.weight[t] = f.update(z, scaled.y[t]).gain;
      if (origin < origins.at.size() && origins.at[origin] == t) {
        p.until.push_back(f.evidence), kept.push_back(f), origin++;
      }
    }
    p.evidence = f.evidence;
    if (p.record) {  // rows before the first origin take the season that is known there
      const Filter<N>& first = kept.empty() ? f : kept[0];
      for (int64_t t = 0; t < (origins.at.empty() ? g.rows : origins.at[0]); t++)
        p.factors.rows[t] = season_factor(first, &basis.rows[t * basis.width]);
    }
    for (size_t o = 0; o < kept.size(); o++) {
      const double time = g.times[origins.at[o]];
      for (int64_t t : origins.targets[o]) {
        Forecast at;
        kept[o].forecast(g.times[t] - time, &basis.rows[t * basis.width] + skip, at.mean, at.variance);
        p.rolling.push_back(at);
        if (p.record) p.factors.rolling.push_back(season_factor(kept[o], &basis.rows[t * basis.width]));
      }
    }
    for (int64_t k = 0; k < g.ahead; k++) {
      Forecast at;
      f.forecast(g.ahead_times[k] - before, &basis.ahead[k * basis.width] + skip, at.mean, at.variance);
      p.ahead.push_back(at);
      if (p.record) p.factors.ahead.push_back(season_factor(f, &basis.ahead[k * basis.width]));
    }
  }

  template <int N> double season_factor(const Filter<N>& f, const double* z) const {
    double sum = 0;
    for (int j = 0; j < basis.season; j++) sum += f.state.x[f.model.base() + j] * z[j];
    return std::exp(std::clamp(sum, -MOST_SEASON, MOST_SEASON));
  }

  // The factors of the season of the best point; none where it has no season.
  Factors season_factors() const {
    Point p = point(points[best].at);
    if (!p.model.season) return {};
    p.record = true, p.factors.rows.assign(size_t(g.rows), 1.0);
    run(p);
    return p.factors;
  }

  void run(Point& p) const {
    const int size = p.model.base() + int(g.regressors) + (p.model.season ? basis.season : 0);
    switch (size) {
      case 2: return run<2>(p, size);
      case 3: return run<3>(p, size);
      case 5: return run<5>(p, size);
      case 6: return run<6>(p, size);
      case 13: return run<13>(p, size);
      case 14: return run<14>(p, size);
      default: return run<0>(p, size);
    }
  }

  size_t visit(std::array<int, 4> at) {
    for (size_t i = 0; i < points.size(); i++)
      if (points[i].at == at) return i;
    points.push_back(point(at));
    run(points.back());
    return points.size() - 1;
  }

  void fit() {
    const std::array<int, 4> size = sizes();
    best = visit(start());
    if (seasonal()) {
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
    average();
  }

  // Mean and variance of the mixture of points, with the weights of one moment.
  template <class Score, class Value> void mix(Score score, size_t from, size_t to, Value value, std::vector<Forecast>& out) const {
    std::vector<double> weight(points.size());
    double most = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t i = 0; i < points.size(); i++) weight[i] = score(points[i]), most = std::max(most, weight[i]);
    for (double& w : weight) w = std::exp(w - most), sum += w;
    for (size_t k = from; k < to; k++) {
      Forecast f;
      for (size_t i = 0; i < points.size(); i++) f.mean += weight[i] / sum * value(points[i])[k].mean;
      for (size_t i = 0; i < points.size(); i++) {
        const Forecast& own = value(points[i])[k];
        f.variance += weight[i] / sum * (own.variance + (own.mean - f.mean) * (own.mean - f.mean));
      }
      out.push_back(f);
    }
  }

  void average() {
    size_t from = 0;
    for (size_t o = 0; o < origins.at.size(); o++) {
      const size_t to = from + origins.targets[o].size();
      mix([o](const Point& p) { return p.until[o] + p.prior; }, from, to, [](const Point& p) -> const std::vector<Forecast>& { return p.rolling; }, rolling);
      from = to;
    }
    mix([](const Point& p) { return p.score(); }, 0, size_t(g.ahead), [](const Point& p) -> const std::vector<Forecast>& { return p.ahead; }, ahead);
    one_step = points[best].one_step;
  }
};

}  // namespace rfa
