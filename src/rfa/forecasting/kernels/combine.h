// Members are joined by weights from rolling errors, and bands are scaled by standardised rolling errors.
#pragma once
#include <memory>

#include "member.h"

namespace rfa {

struct Combination {
  const Given& g;
  const Origins& origins;
  const std::vector<Member>& members;
  std::vector<double> weight, error;  // of each member; error: mean absolute, bounded
  double widening = 1;                // the factor of the members' own spreads

  Combination(const Given& given, const Origins& o, const std::vector<Member>& m, const std::vector<double>& trust)
      : g(given), origins(o), members(m), weight(m.size(), 1.0 / double(m.size())), error(m.size(), 0.0) {
    weigh(trust);
  }

  static double rolled(const Member& m, size_t k) {
    return m.scaled.back(m.rolling[k].mean, m.scaled.adjusted() ? m.scaled.known.rolling[k] : 0);
  }

  // Absolute errors are bounded, so that a wrong reading does not decide. `trust`: the weight of each row.
  void weigh(const std::vector<double>& trust) {
    std::vector<double> all;
    size_t at = 0;
    for (size_t o = 0; o < origins.at.size(); o++)
      for (int64_t t : origins.targets[o]) {
        for (const Member& m : members) all.push_back(std::abs(g.values[t] - rolled(m, at)));
        at++;
      }
    double usual = median(all);
    if (!(usual > 0) && !all.empty()) {  // most readings are alike, such as no sale
      usual = 0;
      for (double e : all) usual += std::isfinite(e) ? e / double(all.size()) : 0;
    }
    const double bound = MOST_ERROR * usual, floor = LEAST_ERROR * usual;
    for (size_t i = 0; i < members.size() && at; i++) {
      double sum = 0, count = 1e-9;
      for (size_t o = 0, k = 0; o < origins.at.size(); o++)
        for (int64_t t : origins.targets[o]) {
          const double w = trust[t];
          sum += w * std::min(std::abs(g.values[t] - rolled(members[i], k)), bound), count += w, k++;
        }
      error[i] = sum / count;
    }
    const double n = double(origins.at.size()), power = WEIGHT_POWER * n / (n + WEIGHT_ORIGINS);
    double total = 0;
    const double least = *std::min_element(error.begin(), error.end()) + floor;
    for (size_t i = 0; i < members.size(); i++) {
      weight[i] = at && least > 0 ? std::pow(least / (error[i] + floor), power) : 1;
      if (!std::isfinite(weight[i])) weight[i] = 0;
      total += weight[i];
    }
    for (double& w : weight) w /= total;
  }

  // The weighted mean of the members' quantiles at a standard normal z.
  template <class Of, class Known> double value(Of forecast, Known season, double z) const {
    double sum = 0;
    for (size_t i = 0; i < members.size(); i++) {
      if (!(weight[i] > 0)) continue;
      const Forecast& f = forecast(members[i]);
      const Scaled& s = members[i].scaled;
      sum += weight[i] * s.back(f.mean + z * s.deviation(f.variance), s.adjusted() ? season(s.known) : 0);
    }
    return sum;
  }

  void calibrate(const std::vector<double>& trust) {
    double sum = BAND_PRIOR * BAND_FACTOR, count = BAND_PRIOR;
    for (size_t o = 0, k = 0; o < origins.at.size(); o++) {
      double own = 0, rows = 1e-9;
      for (int64_t t : origins.targets[o]) {
        auto of = [k](const Member& m) -> const Forecast& { return m.rolling[k]; };
        auto by = [k](const Season& s) { return s.rolling[k]; };
        const double middle = value(of, by, 0), e = g.values[t] - middle;
        const double unit = std::abs(value(of, by, e < 0 ? -1 : 1) - middle);
        const double z = std::min(std::abs(e) / std::max(unit, 1e-300), MOST_STANDARD);
        own += trust[t] * z * 1.2533, rows += trust[t], k++;
      }
      const double part = std::min(rows, 1.0);
      sum += part * own / rows, count += part;
    }
    widening = sum / count;
  }

  // Student-t quantile by that of a normal distribution (Cornish and Fisher).
  static double heavy(double z) {
    const double v = BAND_DEGREES;
    return z + (z * z * z + z) / (4 * v) + (5 * std::pow(z, 5) + 16 * z * z * z + 3 * z) / (96 * v * v);
  }

  // The quantile of a time ahead, and the forecast of a row from those before.
  double ahead(int64_t k, double z) const {
    return value([k](const Member& m) -> const Forecast& { return m.ahead[k]; },
                 [k](const Season& s) { return s.ahead[k]; }, heavy(z) * widening);
  }
  double one_step(int64_t t) const {
    return value([t](const Member& m) { return Forecast{m.one_step[t], 0}; },
                 [t](const Season& s) { return s.rows[t]; }, 0);
  }
};

}  // namespace rfa
