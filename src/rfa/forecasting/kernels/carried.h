// What is carried on after the last reading of a series, and how it goes on: nothing is fitted.
#pragma once
#include <stdexcept>

#include "combine.h"
#include "smooth.h"

namespace rfa {

constexpr int MEMBERS = 28;  // families times scales, without and with a free season

inline int64_t state_room(double period, double second, int64_t regressors) {
  const int64_t season = period >= 2 ? int64_t(std::min(period, 2.0 * MOST_WAVES)) : 0;
  const int64_t n = 4 + season + regressors, state = n + n * (n + 1) / 2 + SCALES + 2;
  const auto bins = [](double of) { return of <= MOST_BINS ? int64_t(Profile::bins(of)) : 0; };
  const int64_t profile = 8 + 2 * (bins(period) + bins(second));
  return 24 + MEMBERS * (20 + std::max<int64_t>(2 * state, 2 * MOST_LAGS + 8)) + 2 * profile;
}

// Which season is taken away from a member's readings: none, that of the first member, or a free one.
enum class Adjusted { NOT, FIRST, FREE };

struct CarriedMember {
  Model model;
  bool logarithmic, lagged;
  Adjusted adjusted;
  double weight;
  std::vector<double> state;  // of the filter, or of the autoregression, written out

  double deviation(double variance) const {
    return logarithmic ? std::min(std::sqrt(variance), MOST_LOG_SPREAD) : std::sqrt(variance);
  }
};

struct Carried {
  double period = 0, second = 0, time = 0, widening = 1;
  int season = 0, leading = 0, regressors = 0;
  bool robust = true;
  std::vector<CarriedMember> members;
  std::array<Profile, 2> profiles;  // of the linear and of the logarithmic scale

  void pass(Archive& a) {
    int64_t count = int64_t(members.size());
    a.pass(period), a.pass(time), a.pass(widening), a.pass_integer(season), a.pass_integer(leading),
        a.pass_integer(regressors), a.pass_integer(robust), a.pass_integer(count), a.pass(second);
    // a state may come from a file that somebody wrote: no number of it may lead beyond what there is
    const double most = period >= 2 ? std::min(period, 2.0 * MOST_WAVES) : 0;
    if (a.reading && !(count > 0 && count <= MEMBERS && season >= 0 && season <= most && regressors == 0))
      throw std::invalid_argument("state");
    members.resize(size_t(count));
    for (CarriedMember& m : members) {
      int64_t adjusted = int64_t(m.adjusted), size = int64_t(m.state.size());
      a.pass(m.model), a.pass_integer(m.logarithmic), a.pass_integer(m.lagged), a.pass_integer(adjusted),
          a.pass(m.weight);
      a.pass_integer(size);
      m.adjusted = Adjusted(std::clamp<int64_t>(adjusted, 0, 2));
      if (size < 0 || size_t(size) > a.numbers.size() + m.state.size()) throw std::invalid_argument("state");
      m.state.resize(size_t(size));
      for (double& x : m.state) a.pass(x);
    }
    for (Profile& profile : profiles) profile.pass(a);
  }

  // Seasons of rows and of times ahead, as they are known before each.
  struct Known {
    Season first;
    std::array<Season, 2> free;
    const Season& of(const CarriedMember& m) const {
      return m.adjusted == Adjusted::FIRST ? first : free[m.logarithmic];
    }
  };

  double from(const CarriedMember& m, double value, const Season& s, double season) const {
    if (m.adjusted != Adjusted::NOT) value = s.without(value, season);
    return m.logarithmic ? std::log(value) : value;
  }
  double back(const CarriedMember& m, double v, const Season& s, double season) const {
    if (m.logarithmic) v = std::exp(std::min(v, MOST_LOG));
    return m.adjusted == Adjusted::NOT ? v : s.with(v, season);
  }

  void pass_profiles(const Given& g, Known& known) {
    for (int i = 0; i < 2; i++) {
      Season& s = known.free[i];
      s.added = !i, s.rows.assign(size_t(g.rows), i), s.ahead.assign(size_t(g.ahead), i);
      if (!(profiles[i].period[0] >= 2)) continue;
      for (int64_t t = 0; t < g.rows; t++) {
        s.rows[t] = profiles[i].season(g.times[t], i);
        const double y = i ? std::log(g.values[t]) : g.values[t];
        if (std::isfinite(y)) profiles[i].join(g.times[t], y);
      }
      for (int64_t k = 0; k < g.ahead; k++) s.ahead[k] = profiles[i].season(g.ahead_times[k], i);
    }
  }

  // Each row passes each filter, then each autoregression, which is told the readings that are refused.
  template <class P> void update(const Given& g, const P& p) {
    const Basis basis(g, season, period);
    Known known;
    const bool added = !members[0].logarithmic;
    known.first = {
        added, std::vector<double>(size_t(g.rows), !added), {}, std::vector<double>(size_t(g.ahead), !added)};
    pass_profiles(g, known);
    std::vector<double> sum(size_t(g.rows), 0.0), trust(size_t(g.rows), 1.0);
    std::vector<std::vector<Forecast>> ahead(members.size());
    for (size_t i = 0; i < members.size(); i++)
      if (!members[i].lagged) filter(i, g, p, basis, known, sum, trust, ahead[i]);
    for (size_t i = 0; i < members.size(); i++)
      if (members[i].lagged) lag(members[i], g, known, sum, trust, ahead[i]);
    if (g.rows) time = g.times[g.rows - 1];
    std::copy(sum.begin(), sum.end(), p.one_step);
    for (int64_t k = 0; k < g.ahead; k++) {
      auto value = [&](double z) {
        double total = 0;
        for (size_t i = 0; i < members.size(); i++) {
          const CarriedMember& m = members[i];
          const Season& s = known.of(m);
          total += m.weight * back(m, ahead[i][k].mean + z * m.deviation(ahead[i][k].variance), s, s.ahead[k]);
        }
        return total;
      };
      p.mean[k] = value(0);
      for (int64_t q = 0; q < p.probabilities; q++)
        p.quantiles[k * p.probabilities + q] = value(Combination::heavy(p.normal[q]) * widening);
    }
  }

  // The first member's season is the one that is taken away from others.
  template <class P> void filter(size_t i, const Given& g, const P& p, const Basis& basis, Known& known,
                                 std::vector<double>& sum, std::vector<double>& trust, std::vector<Forecast>& ahead) {
    CarriedMember& m = members[i];
    const int n = m.model.base() + (m.model.season ? season : 0), skip = m.model.season ? 0 : season;
    with_states(n, [&](auto size) {
      Filter<size()> f(m.model, n, robust);
      Archive from_numbers{m.state, 0, true}, to;
      from_numbers.pass(f);
      auto season_at = [&](const double* z) {
        double total = 0;
        for (int j = 0; j < season; j++) total += f.state.x[m.model.base() + j] * z[j];
        return m.logarithmic ? Season::from_log(total) : total;
      };
      const Season& s = known.of(m);
      double before = time;
      for (int64_t t = 0; t < g.rows; t++) {
        const double* z = &basis.rows[t * basis.width] + skip;
        f.predict(g.times[t] - before), before = g.times[t];
        if (i == 0 && m.model.season) known.first.rows[t] = season_at(z);
        const double y = from(m, g.values[t], s, s.rows[t]);
        sum[t] += m.weight * back(m, f.value(z), s, s.rows[t]);
        Reading r;
        if (std::isfinite(y)) r = f.update(z, y);
        if (i != size_t(leading)) continue;
        const Forecast now = f.forecast(Lag(m.model, 0), z);
        const double half = BAND_NORMAL * std::sqrt(now.variance);
        p.fitted[t] = back(m, now.mean, s, s.rows[t]), p.low[t] = back(m, now.mean - half, s, s.rows[t]),
        p.high[t] = back(m, now.mean + half, s, s.rows[t]);
        trust[t] = std::isfinite(y) ? r.weight : 0;
        p.weights[t] = std::isnan(g.values[t]) ? g.values[t] : trust[t];
      }
      for (int64_t k = 0; k < g.ahead; k++) {
        const double* z = &basis.ahead[k * basis.width] + skip;
        ahead.push_back(f.forecast(Lag(m.model, g.ahead_times[k] - before), z));
        if (k) ahead[k].variance = std::max(ahead[k].variance, ahead[k - 1].variance);
        if (i == 0 && m.model.season) known.first.ahead[k] = season_at(z);
      }
      to.pass(f), m.state = to.numbers;
    });
  }

  // Steps without a reading, or with one that is refused, are filled with what is expected.
  void lag(CarriedMember& m, const Given& g, const Known& known, std::vector<double>& sum,
           const std::vector<double>& trust, std::vector<Forecast>& ahead) const {
    Lags lags;
    Archive from_numbers{m.state, 0, true}, to;
    lags.pass(from_numbers);
    const Season& s = known.of(m);
    double before = time;
    auto steps = [&](double later) { return int64_t(std::clamp(std::round(later - before), 1.0, double(MOST_PATH))); };
    for (int64_t t = 0; t < g.rows; t++) {
      for (int64_t step = steps(g.times[t]); step > 1; step--) lags.join(lags.next());
      before = g.times[t];
      const double next = lags.next(), y = from(m, g.values[t], s, s.rows[t]);
      sum[t] += m.weight * back(m, next, s, s.rows[t]);
      lags.join(std::isfinite(y) && trust[t] >= REFUSED ? y : next);
    }
    const std::vector<Forecast> path = lags.path(steps(g.ahead_times[g.ahead - 1]));
    for (int64_t k = 0; k < g.ahead; k++) ahead.push_back(path[size_t(steps(g.ahead_times[k]) - 1)]);
    lags.pass(to), m.state = to.numbers;
  }
};

}  // namespace rfa
