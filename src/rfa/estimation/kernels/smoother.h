// The two-filter smoother: the filter's states, combined with the information of all later observations.
#pragma once
#include <exception>

#include "filter.h"

namespace rfa {

constexpr double ROUNDING = 1e-14;  // a pivot of an information matrix at a unit diagonal that comes from rounding
constexpr double NO_INFORMATION = 1e-280;  // precisions from here on: the square of their scale would overflow

template <int N> struct Smoother {
  Series<N>& g;
  Matrices<N> of;
  const int64_t n;
  std::vector<double> covariances;
  std::vector<Covariance<N>> diffuse;  // the first states, while a direction is diffuse
  std::vector<double> j, y;            // later information: J and y
  std::vector<double> a, b, c, scale, left, vector, values;
  std::vector<int64_t> pivots;
  int64_t rank = 0;

  explicit Smoother(Series<N>& series)
      : g(series), of(g.steps.of), n(g.n), j(of.nn()), y(size_t(n)), a(of.nn()), b(of.nn()), c(of.nn()), scale(n),
        left(n), vector(n), values(n), pivots(size_t(n)) {}

  // Keeps the covariance at k. The means are in the problem's output.
  void keep(int64_t k) {
    covariances.insert(covariances.end(), g.state.p.begin(), g.state.p.end());
    if (g.state.diffuse) {
      while (int64_t(diffuse.size()) < k) diffuse.push_back(g.state);
      diffuse.push_back(g.state);
    }
  }

  void run() {
    for (int64_t k = g.p.length - 1; k >= 0; k--) {
      combine(k);
      if (k) back(k);
    }
  }

  // The information at k, its own row of some weight included, as information on the state before.
  void back(int64_t k, double weight = 1) {
    const double *transition = g.p.transition + g.lag(k), *variance = g.p.variance + g.lag(k);
    for (int64_t i = 0; i < g.m; i++) {
      const double* row = g.row(k, i);
      const double z = weight * g.values(k)[i];
      for (int r = 0; r < of.n(); r++)
        for (int q = 0; q < of.n(); q++) j[r * n + q] += weight * row[r] * row[q];
      for (int r = 0; r < of.n(); r++) y[r] += row[r] * z;
    }
    of.multiply(j.data(), variance, a.data());
    for (int r = 0; r < of.n(); r++) a[r * n + r] += 1;
    of.invert(a.data(), b.data());  // (I + J V)^-1
    of.multiply(b.data(), j.data(), a.data());
    of.symmetrize(a.data());
    of.transposed_multiply(transition, a.data(), c.data());
    of.multiply(c.data(), transition, j.data());
    of.apply(b.data(), y.data(), vector.data());
    of.apply_transposed(transition, vector.data(), y.data());
  }

  // The later information as an observation with unit noise and rows c, `rank` of them: a Cholesky factor of J with
  // pivots, at a unit diagonal. J = c^T c.
  void observe() {
    rank = 0;
    for (int r = 0; r < of.n(); r++) {
      const double precision = j[r * n + r];
      scale[r] = precision > NO_INFORMATION ? 1 / std::sqrt(precision) : 1;
    }
    for (int r = 0; r < of.n(); r++) left[r] = scale[r] * scale[r] * j[r * n + r];
    for (; rank < of.n(); rank++) {
      const int64_t pivot = std::max_element(left.begin(), left.end()) - left.begin();
      if (!(left[pivot] > ROUNDING)) break;
      double* row = &c[rank * n];
      for (int q = 0; q < of.n(); q++) row[q] = scale[pivot] * scale[q] * j[pivot * n + q];
      for (int64_t earlier = 0; earlier < rank; earlier++)
        for (int q = 0; q < of.n(); q++) row[q] -= c[earlier * n + pivot] * c[earlier * n + q];
      for (int64_t earlier = 0; earlier < rank; earlier++) row[pivots[earlier]] = 0;
      const double root = std::sqrt(left[pivot]);
      row[pivot] = left[pivot];
      for (int q = 0; q < of.n(); q++) row[q] /= root, left[q] -= row[q] * row[q];
      left[pivot] = 0, pivots[rank] = pivot;
    }
    for (int64_t r = 0; r < rank; r++)
      for (int q = 0; q < of.n(); q++) c[r * n + q] /= scale[q];
  }

  // The values of its rows, in `values`: c^T values = y.
  void observe_values() {
    for (int64_t r = 0; r < rank; r++) {
      values[r] = y[pivots[r]];
      for (int64_t earlier = 0; earlier < r; earlier++) values[r] -= c[earlier * n + pivots[r]] * values[earlier];
      values[r] /= c[r * n + pivots[r]];
    }
  }

  // The state at k with the later information.
  void combine(int64_t k) {
    observe();
    observe_values();
    if (k < int64_t(diffuse.size())) g.state = diffuse[k];
    else of.copy(&covariances[k * n * n], g.state.p.data()), g.state.diffuse = false;
    std::copy(g.p.mean + k * n, g.p.mean + (k + 1) * n, g.mean.begin());
    for (int64_t r = 0; r < rank; r++) g.observe(&c[r * n], values[r]);
    write(k);
  }

  void write(int64_t k) {
    g.steps.write(g.state, g.p.covariance + k * n * n);
    std::copy(g.mean.begin(), g.mean.end(), g.p.mean + k * n);
  }
};

// The Kalman filter and smoother, from the state at the first row.
template <int N> void smooth_rows(const Problem& p, const Covariance<N>& start, const std::vector<double>& start_mean) {
  Series<N> series(p, start, start_mean);
  Smoother<N> smoother(series);
  for (int64_t k = 0; k < p.length; k++) {
    if (k ? !series.predict(k) : !series.steps.finite(series.state.p.data())) {
      *p.overflow = k;
      return;
    }
    series.update(k);
    smoother.keep(k), smoother.write(k);
  }
  smoother.run();
}

}  // namespace rfa
