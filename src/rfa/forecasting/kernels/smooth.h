// What all readings together say of each one: smoothed values with bands, and weights that tell a wrong reading from a
// jump.
#pragma once
#include "member.h"

namespace rfa {

struct Smoothed {
  std::vector<double> mean, variance, weight;
};  // of each row; the variance is that of a reading

// One row, as the filter expected it.
template <int N> struct Expected {
  std::array<double, Filter<N>::C> h;  // P H'
  double value, innovation, variance, gain;
  Lag lag;
};

template <int N> struct Smoothing {
  static constexpr int C = Filter<N>::C;
  const Member& member;
  const Model& model;
  const int n, base;
  std::array<double, C> r{}, nk{};  // information of later readings: r, and its covariance
  std::array<double, C * C> later{};

  Smoothing(const Member& m, const Model& of) : member(m), model(of), n(m.states(of)), base(of.base()) {}

  Filter<N> filter() const { return member.filter<N>(model, n); }

  // The readings at which the level has jumped.
  std::vector<int64_t> jumps() const {
    const Given& g = member.g;
    Filter<N> f = filter();
    std::vector<int64_t> found;
    double before = g.times[0];
    for (int64_t t = 0; t < g.rows; t++) {
      if (std::isnan(member.scaled.y[t])) continue;
      f.predict(g.times[t] - before), before = g.times[t];
      f.update(member.row(model, t), member.scaled.y[t]);
      if (f.jumped < 0) continue;
      if (!found.empty() && found.back() == f.jumped) found.pop_back();
      else found.push_back(f.jumped);
      f.jumped = -1;
    }
    return found;
  }

  Smoothed run() {
    const Given& g = member.g;
    const std::vector<int64_t> jumped = jumps();
    Filter<N> f = filter();
    std::vector<Expected<N>> rows;
    size_t next = 0;
    for (int64_t t = 0; t < g.rows; t++) {
      const double y = member.scaled.y[t], *z = member.row(model, t);
      f.predict(t ? g.times[t] - g.times[t - 1] : 0);
      Reading reading;
      const Lag lag = f.last;
      f.look(f.state, z, std::isnan(y) ? 0 : y, f.ph, reading);
      if (next < jumped.size() && f.readings == jumped[next] && !std::isnan(y)) {
        f.inflate(f.state, reading), next++;
        f.look(f.state, z, y, f.ph, reading);
      }
      rows.push_back({f.ph, f.value(z), reading.innovation, reading.variance, std::isnan(y) ? 0 : reading.gain, lag});
      if (!std::isnan(y)) { f.use(f.state, f.ph, reading), f.readings++; }
    }
    return back(f, rows);
  }

  Smoothed back(const Filter<N>& f, const std::vector<Expected<N>>& rows) {
    const size_t count = rows.size();
    Smoothed out{std::vector<double>(count), std::vector<double>(count), std::vector<double>(count, 1.0)};
    for (size_t t = count; t-- > 0;) {
      const Expected<N>& e = rows[t];
      if (e.gain > 0) observe(f, e, int64_t(t), out);
      double moved = 0, known = 0;
      for (int i = 0; i < n; i++) {
        moved += e.h[i] * r[i];
        for (int j = 0; j < n; j++) known += e.h[i] * later[i * C + j] * e.h[j];
      }
      out.mean[t] = e.value + moved;
      out.variance[t] = (std::max(e.variance - 1 - known, 0.0) + 1) * f.state.variance();
      if (t) carry(e.lag);
    }
    return out;
  }

  // A reading joins the later ones. Without it, the others say u / d with variance 1 / d.
  void observe(const Filter<N>& f, const Expected<N>& e, int64_t t, Smoothed& out) {
    const double total = e.variance / e.gain;
    double kr = 0, knk = 0;
    for (int i = 0; i < n; i++) {
      kr += e.h[i] * r[i] / total, nk[i] = 0;
      for (int j = 0; j < n; j++) nk[i] += later[i * C + j] * e.h[j] / total;
    }
    for (int i = 0; i < n; i++) knk += e.h[i] * nk[i] / total;
    const double u = e.innovation / total - kr, d = 1 / total + knk;
    Reading alone;
    alone.innovation = u / d, alone.variance = std::max(1 / d - (total - e.variance), 1.0);
    f.weigh(f.state, alone);
    out.weight[size_t(t)] = alone.weight;
    const double* z = member.row(model, t);
    std::array<double, C> seen{};
    seen[0] = 1;
    if (base > 2) seen[2] = 1;
    for (int j = base; j < n; j++) seen[j] = z[j - base];
    for (int i = 0; i < n; i++) {
      r[i] += seen[i] * u;
      for (int j = 0; j < n; j++) later[i * C + j] += seen[i] * seen[j] * d - seen[i] * nk[j] - nk[i] * seen[j];
    }
  }

  // From a row to the one before it.
  void carry(const Lag& lag) {
    auto turn = [&](double* x, int step) {
      x[step] = lag.damped * x[step] + lag.carried * x[0];
      const double first = x[2 * step];
      if (base > 2) x[2 * step] *= lag.kept;
      if (base > 3) x[2 * step] -= lag.turned * x[3 * step], x[3 * step] = lag.kept * x[3 * step] + lag.turned * first;
    };
    turn(&r[0], 1);
    for (int i = 0; i < n; i++) turn(&later[size_t(i) * C], 1);
    for (int j = 0; j < n; j++) turn(&later[size_t(j)], C);
  }
};

inline Smoothed smooth(const Member& member) {
  const Model& model = member.points[member.best].model;
  return with_states(member.states(model), [&](auto n) { return Smoothing<n()>(member, model).run(); });
}

}  // namespace rfa
