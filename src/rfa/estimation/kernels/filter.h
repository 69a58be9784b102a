// The Kalman filter of one series.
#pragma once
#include "gaussian.h"
#include "problem.h"

namespace rfa {

template <int N> struct Series {
  const Problem& p;
  const int64_t n, m;
  Steps<N> steps;
  Covariance<N> state;
  std::vector<double> mean, x;
  Components components;

  Series(const Problem& problem, const Covariance<N>& start, const std::vector<double>& start_mean)
      : p(problem), n(p.states), m(p.components), steps(start.of), state(start), mean(start_mean), x(n), components(m, n) {}

  int64_t lag(int64_t k) const { return p.lag_index[k - 1] * n * n; }
  const double* row(int64_t k, int64_t i) const { return p.rows + (k * m + i) * n; }
  const double* values(int64_t k) const { return p.values + k * m; }

  // From the row before k to k. False where the covariance overflows.
  bool predict(int64_t k) {
    steps.predict(state, p.transition + lag(k), p.variance + lag(k));
    steps.of.apply(p.transition + lag(k), mean.data(), x.data());
    mean.swap(x);
    return steps.finite(state.p.data());
  }

  // An observation h x + e = z.
  void observe(const double* h, double z) {
    Component& c = components.all[0];
    steps.update(state, h, c);
    if (!c.seen) return;
    const double innovation = z - steps.of.dot(h, mean.data());
    for (int64_t j = 0; j < n; j++) mean[j] += c.gain[j] * innovation;
  }

  // The row at k, component by component.
  void update(int64_t k) {
    for (int64_t i = 0; i < m; i++) observe(row(k, i), values(k)[i]);
  }
};

}  // namespace rfa
