// What is carried on after the last reading of a series, and how it goes on: nothing is fitted.
#pragma once
#include <stdexcept>

#include "combine.h"
#include "smooth.h"

namespace rfa {

constexpr int MEMBERS = 10;  // families times scales

inline int64_t state_room(double period, int64_t regressors) {
  const int64_t season = period >= 2 ? int64_t(std::min(period, 2.0 * MOST_WAVES)) : 0;
  const int64_t n = 4 + season + regressors, state = n + n * (n + 1) / 2 + SCALES + 2;
  return 16 + MEMBERS * (20 + 2 * state);
}

struct CarriedMember {
  Model model;
  bool logarithmic, adjusted;
  double weight;
  std::vector<double> filter;  // written out

  double deviation(double variance) const {
    return logarithmic ? std::min(std::sqrt(variance), MOST_LOG_SPREAD) : std::sqrt(variance);
  }
  double back(double v, double factor) const { return logarithmic ? std::exp(std::min(v, MOST_LOG)) : v * factor; }
};

struct Carried {
  double period = 0, time = 0, widening = 1;
  int season = 0, leading = 0, regressors = 0;
  bool robust = true;
  std::vector<CarriedMember> members;

  void pass(Archive& a) {
    int64_t count = int64_t(members.size());
    a.pass(period), a.pass(time), a.pass(widening), a.pass_integer(season), a.pass_integer(leading),
        a.pass_integer(regressors), a.pass_integer(robust), a.pass_integer(count);
    // a state may come from a file that somebody wrote: no number of it may lead beyond what there is
    const double most = period >= 2 ? std::min(period, 2.0 * MOST_WAVES) : 0;
    if (a.reading && !(count > 0 && count <= MEMBERS && season >= 0 && season <= most && regressors == 0))
      throw std::invalid_argument("state");
    members.resize(size_t(count));
    for (CarriedMember& m : members) {
      a.pass(m.model), a.pass_integer(m.logarithmic), a.pass_integer(m.adjusted), a.pass(m.weight);
      int64_t size = int64_t(m.filter.size());
      a.pass_integer(size);
      if (size < 0 || size_t(size) > a.numbers.size() + m.filter.size()) throw std::invalid_argument("state");
      m.filter.resize(size_t(size));
      for (double& x : m.filter) a.pass(x);
    }
  }

  // Filters each row with one member. The first member's season gives the factors of all that are adjusted.
  template <class P> void update(const Given& g, const P& p) {
    Basis basis(g, season, period);
    std::vector<double> sum(size_t(g.rows), 0.0), factors(size_t(g.rows), 1.0), ahead_factors(size_t(g.ahead), 1.0);
    std::vector<std::vector<Forecast>> ahead(members.size());
    for (size_t i = 0; i < members.size(); i++) {
      CarriedMember& m = members[i];
      const int n = m.model.base() + (m.model.season ? season : 0), skip = m.model.season ? 0 : season;
      with_states(n, [&](auto size) {
        Filter<size()> f(m.model, n, robust);
        Archive from{m.filter, 0, true}, to;
        from.pass(f);
        double before = time;
        for (int64_t t = 0; t < g.rows; t++) {
          const double* z = &basis.rows[t * basis.width] + skip;
          f.predict(g.times[t] - before), before = g.times[t];
          if (i == 0 && m.model.season) factors[t] = season_at(&f.state.x[m.model.base()], z, season);
          const double factor = m.adjusted ? factors[t] : 1,
                       y = m.logarithmic ? std::log(g.values[t]) : g.values[t] / factor;
          sum[t] += m.weight * m.back(f.value(z), factor);
          Reading r;
          if (std::isfinite(y)) r = f.update(z, y);
          if (i != size_t(leading)) continue;
          const Forecast now = f.forecast(Lag(m.model, 0), z);
          const double half = BAND_NORMAL * std::sqrt(now.variance);
          p.fitted[t] = m.back(now.mean, factor), p.low[t] = m.back(now.mean - half, factor),
          p.high[t] = m.back(now.mean + half, factor);
          p.weights[t] = std::isnan(g.values[t]) ? g.values[t] : std::isfinite(y) ? r.weight : 0;
        }
        for (int64_t k = 0; k < g.ahead; k++) {
          const double* z = &basis.ahead[k * basis.width] + skip;
          ahead[i].push_back(f.forecast(Lag(m.model, g.ahead_times[k] - before), z));
          if (k) ahead[i][k].variance = std::max(ahead[i][k].variance, ahead[i][k - 1].variance);
          if (i == 0 && m.model.season) ahead_factors[k] = season_at(&f.state.x[m.model.base()], z, season);
        }
        to.pass(f), m.filter = to.numbers;
      });
    }
    if (g.rows) time = g.times[g.rows - 1];
    std::copy(sum.begin(), sum.end(), p.one_step);
    for (int64_t k = 0; k < g.ahead; k++) {
      auto value = [&](double z) {
        double total = 0;
        for (size_t i = 0; i < members.size(); i++) {
          const double factor = members[i].adjusted ? ahead_factors[k] : 1;
          total += members[i].weight *
                   members[i].back(ahead[i][k].mean + z * members[i].deviation(ahead[i][k].variance), factor);
        }
        return total;
      };
      p.mean[k] = value(0);
      for (int64_t q = 0; q < p.probabilities; q++)
        p.quantiles[k * p.probabilities + q] = value(Combination::heavy(p.normal[q]) * widening);
    }
  }
};

}  // namespace rfa
