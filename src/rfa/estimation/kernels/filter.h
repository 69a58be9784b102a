// The Kalman filter of the series that share a covariance.
#pragma once
#include "gaussian.h"
#include "problem.h"

namespace rfa {

// Means and least squares of the series of one group at one time index.
template <int N> struct Group {
  const Problem& p;
  const int64_t group, first, count, model, n, m;
  Steps<N> steps;
  Covariance<N> state;
  Components components;
  std::vector<double> means, least_squares, x;

  Group(const Problem& problem, Matrices<N> of, int64_t index)
      : p(problem), group(index), first(index), count(p.covariances == 1 ? p.series : 1),
        model(p.models == 1 ? 0 : index), n(p.states), m(p.components), steps(of),
        state(of, p.start_covariance + index * n * n),
        components(m, n), means(p.start_mean + first * n, p.start_mean + (first + count) * n),
        least_squares(count), x(n) {
    if (p.diffuse) state.set_diffuse(units());
  }

  // The unit of each state while it is diffuse: the change that the first observations would show.
  std::vector<double> units() {
    const auto& of = steps.of;
    std::vector<double> shown(size_t(n), 0.0), moved(of.nn()), next(of.nn());
    bool nothing_yet = true, all = false;
    for (int64_t k = 0; k < p.length && !(k >= 4 * n && all); k++) {
      if (k) of.multiply(p.transition + lag(k) * n * n, moved.data(), next.data()), moved = next;
      for (int i = 0; i < of.nn() && nothing_yet; i++) moved[i] = i % (of.n() + 1) == 0;
      for (int64_t i = 0; i < m; i++) {
        for (int j = 0; j < of.n(); j++) {
          double part = 0;
          for (int l = 0; l < of.n(); l++) part += turned(moved, l, j) ? row(k, i)[l] * moved[l * of.n() + j] : 0;
          shown[j] += part * part;
        }
      }
      all = true;
      for (double size : shown) nothing_yet &= !(size > 0), all &= size > 0;
    }
    for (double& size : shown) size = 1 / std::sqrt(size > 0 && std::isfinite(size) ? size : 1);
    return shown;
  }

  // False where two states turn into each other by rounding alone, as after half a period.
  bool turned(const std::vector<double>& phi, int64_t i, int64_t j) const {
    const double both = std::abs(phi[i * n + j] * phi[j * n + i]);
    return both == 0 || !(both < NO_TURN * std::abs(phi[i * n + i] * phi[j * n + j]));
  }

  int64_t lag(int64_t k) const { return p.lag_index[model * (p.length - 1) + k - 1]; }
  const double* row(int64_t k, int64_t i) const { return p.rows + ((model * p.length + k) * m + i) * n; }
  const double* values(int64_t series, int64_t k) const { return p.values + ((first + series) * p.length + k) * m; }

  // From the time index before k to k. False where the covariance overflows.
  bool predict(int64_t k) {
    const double* transition = p.transition + lag(k) * n * n;
    steps.predict(state, transition, p.variance + lag(k) * n * n);
    for (int64_t s = 0; s < count; s++) {
      steps.of.apply(transition, &means[s * n], x.data());
      std::copy(x.begin(), x.end(), &means[s * n]);
    }
    return steps.finite(state.p.data());
  }

  // Component i with the value z.
  void move(const Component& c, const double* row, int64_t s, double z) {
    const double innovation = z - steps.of.dot(row, &means[s * n]);
    for (int64_t j = 0; j < n; j++) means[s * n + j] += c.gain[j] * innovation;
    if (!c.shows) least_squares[s] += innovation * innovation / c.variance;
  }

  // The row at k, component by component.
  void update(int64_t k) {
    for (int64_t i = 0; i < m; i++) {
      Component& c = components.all[i];
      steps.update(state, row(k, i), c);
      if (!c.seen) continue;
      for (int64_t s = 0; s < count; s++) move(c, row(k, i), s, values(s, k)[i]);
    }
  }
};

}  // namespace rfa
