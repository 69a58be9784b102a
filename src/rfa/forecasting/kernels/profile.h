// A free season: what each phase of one or two periods adds to a slow level, as it was known at each time. Additive
// exponential smoothing with two seasons (Taylor 2003), whose errors are bounded: a wrong reading moves little.
#pragma once
#include "series.h"

namespace rfa {

struct Profile {
  std::array<double, 2> period{}, gain{};
  std::array<std::vector<double>, 2> phases, visits;
  double level = 0, spread = 1, readings = 0;

  Profile() = default;
  Profile(double first, double second, double of_gain, double start, double of_spread)
      : period{first, second}, gain{of_gain, of_gain}, level(start), spread(of_spread) {
    for (int i = 0; i < 2; i++) phases[i].assign(bins(period[i]), 0.0), visits[i] = phases[i];
  }

  static size_t bins(double of) { return of >= 2 ? size_t(std::lround(of)) : 0; }

  void pass(Archive& a) {
    a.pass(period[0]), a.pass(period[1]), a.pass(gain[0]), a.pass(level), a.pass(spread), a.pass(readings);
    gain[1] = gain[0];
    for (int i = 0; i < 2; i++) {
      if (!(period[i] >= 0 && period[i] <= MOST_BINS)) throw std::invalid_argument("state");
      phases[i].resize(bins(period[i])), visits[i].resize(bins(period[i]));
      for (double& x : phases[i]) a.pass(x);
      for (double& x : visits[i]) a.pass(x);
    }
  }

  size_t bin(int i, double time) const {
    const double phase = std::fmod(std::fmod(time, period[i]) + period[i], period[i]) / period[i];
    return std::min(size_t(phase * double(phases[i].size()) + 1e-6), phases[i].size() - 1);
  }

  double at(double time) const {
    double sum = 0;
    for (int i = 0; i < 2; i++)
      if (!phases[i].empty()) sum += phases[i][bin(i, time)];
    return sum;
  }

  // What it adds, or on a logarithmic scale the factor that it is.
  double season(double time, bool logarithmic) const { return logarithmic ? Season::from_log(at(time)) : at(time); }

  // A reading joins. Returns its absolute error, bounded.
  double join(double time, double y) {
    const double error = y - level - at(time),
                 bounded = std::clamp(error, -PROFILE_BOUND * spread, PROFILE_BOUND * spread);
    const double rate = 1 / std::min(readings + PROFILE_READINGS, std::max(5 * period[0], 50.0));
    readings++;
    level += PROFILE_LEVEL / period[0] * bounded;
    spread = std::max(spread + rate * (1.2533 * std::abs(bounded) - spread), 1e-9 * (std::abs(level) + spread));
    for (int i = 0; i < 2; i++) {
      if (phases[i].empty()) continue;
      const size_t k = bin(i, time);
      phases[i][k] += std::max(gain[i], 1 / (visits[i][k] + PROFILE_VISITS[i])) * bounded;
      visits[i][k]++;
    }
    return std::abs(bounded);
  }
};

}  // namespace rfa
