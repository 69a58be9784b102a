// The Kalman filter of the series that share a covariance.
#pragma once
#include "gaussian.h"
#include "problem.h"

namespace rfa {

// Means, least squares and log densities of the series of one group at one time index.
template <int N> struct Group {
  const Problem& p;
  const int64_t group, first, count, model, n, m;
  Steps<N> steps;
  Covariance<N> state;
  Components components;
  std::vector<double> means, least_squares, x, spread;

  Group(const Problem& problem, Matrices<N> of, int64_t index)
      : p(problem), group(index), first(index), count(p.covariances == 1 ? p.series : 1),
        model(p.models == 1 ? 0 : index), n(p.states), m(p.components), steps(of),
        state(of, p.start_covariance + index * n * n),
        components(m, n), means(p.start_mean + first * n, p.start_mean + (first + count) * n),
        least_squares(count), x(n), spread(size_t(m * n)) {
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

  // Whether the row that was last used shows a diffuse direction. It then has no prediction.
  bool shows() const {
    for (const Component& c : components.all)
      if (c.seen && c.shows) return true;
    return false;
  }

  int64_t pattern(int64_t k) const { return p.row_index[model * p.length + k]; }
  int64_t lag(int64_t k) const { return p.lag_index[model * (p.length - 1) + k - 1]; }
  const double* row(int64_t k, int64_t i) const { return p.rows + (pattern(k) * m + i) * n; }
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

  // Component i with the value z. Returns the innovation.
  double move(const Component& c, const double* row, int64_t s, double z) {
    const double innovation = z - steps.of.dot(row, &means[s * n]);
    for (int64_t j = 0; j < n; j++) means[s * n + j] += c.gain[j] * innovation;
    if (!c.shows) least_squares[s] += innovation * innovation / c.variance;
    return innovation;
  }

  // The row at k. `density` gets the log density of each series where it is wanted.
  void update(int64_t k, double* density) {
    for (int64_t i = 0; i < m; i++) {
      Component& c = components.all[i];
      steps.update(state, row(k, i), c);
      if (!c.seen) continue;
      const double half_log = density ? std::log(c.variance) / 2 : 0;
      for (int64_t s = 0; s < count; s++) {
        const double innovation = move(c, row(k, i), s, values(s, k)[i]);
        if (density) density[s] -= half_log + innovation * innovation / c.variance / 2;
      }
    }
  }

  // Whether H P H^T + I has the digits of I: by its Cholesky factor.
  bool noise_is_kept(int64_t k) {
    if (m == 1) return true;
    Matrices<0> of(m);
    std::vector<double> variance(size_t(m * m));
    for (int64_t i = 0; i < m; i++) {
      steps.of.apply(state.p.data(), row(k, i), &spread[i * n]);
      for (int64_t j = 0; j <= i; j++)
        variance[i * m + j] = variance[j * m + i] = steps.of.dot(row(k, j), &spread[i * n]) + (i == j);
    }
    return of.cholesky(variance.data());
  }
};

}  // namespace rfa
