// The two-filter smoother: the filter's states, combined with the information of all later observations.
#pragma once
#include <exception>

#include "filter.h"

namespace rfa {

constexpr double ROUNDING = 1e-14;  // a pivot of an information matrix at a unit diagonal that comes from rounding
constexpr double NO_INFORMATION = 1e-280;  // precisions from here on: the square of their scale would overflow

template <int N> struct Smoother {
  Group<N>& g;
  Matrices<N> of;
  const int64_t n;
  std::vector<double> covariances;
  std::vector<Covariance<N>> diffuse;  // the first states, while a direction is diffuse
  std::vector<double> j, y, constant;  // later information: J of the group, y and c of each series
  std::vector<double> a, b, c, scale, left, vector, mean, values, observed;
  std::vector<int64_t> pivots;
  int64_t rank = 0;

  explicit Smoother(Group<N>& group)
      : g(group), of(g.steps.of), n(g.n), j(of.nn()), y(size_t(g.count * n)),
        constant(size_t(g.count)), a(of.nn()), b(of.nn()), c(of.nn()), scale(n), left(n), vector(n), mean(n), values(n),
        observed(y.size()), pivots(size_t(n)) {
    if (g.p.smooth) covariances.resize(size_t(g.p.length * n * n));
  }


  // Keeps the covariance at k. The means are in the problem's output.
  void keep(int64_t k) {
    of.copy(g.state.p.data(), &covariances[k * n * n]);
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
    const double* transition = g.p.transition + g.lag(k) * n * n;
    const double* variance = g.p.variance + g.lag(k) * n * n;
    for (int64_t i = 0; i < g.m; i++) {
      const double* row = g.row(k, i);
      for (int r = 0; r < of.n(); r++)
        for (int q = 0; q < of.n(); q++) j[r * n + q] += weight * row[r] * row[q];
      for (int64_t s = 0; s < g.count; s++) {
        const double z = weight * g.values(s, k)[i];
        for (int r = 0; r < of.n(); r++) y[s * n + r] += row[r] * z;
        constant[s] += z * g.values(s, k)[i];
      }
    }
    of.multiply(j.data(), variance, a.data());
    for (int r = 0; r < of.n(); r++) a[r * n + r] += 1;
    of.invert(a.data(), b.data());  // (I + J V)^-1
    of.multiply(b.data(), j.data(), a.data());
    of.symmetrize(a.data());
    of.transposed_multiply(transition, a.data(), c.data());
    of.multiply(c.data(), transition, j.data());
    for (int64_t s = 0; s < g.count; s++) {
      of.apply(b.data(), &y[s * n], vector.data());
      of.apply(variance, vector.data(), mean.data());
      constant[s] -= of.dot(&y[s * n], mean.data());
      of.apply_transposed(transition, vector.data(), &y[s * n]);
    }
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
  void observe_values(const double* y) {
    for (int64_t r = 0; r < rank; r++) {
      values[r] = y[pivots[r]];
      for (int64_t earlier = 0; earlier < r; earlier++) values[r] -= c[earlier * n + pivots[r]] * values[earlier];
      values[r] /= c[r * n + pivots[r]];
    }
  }

  // The state at k with the later information.
  void combine(int64_t k) {
    observe();
    Covariance<N>& state = g.state;
    if (k < int64_t(diffuse.size())) state = diffuse[k];
    else of.copy(&covariances[k * n * n], state.p.data()), state.diffuse = false;
    for (int64_t s = 0; s < g.count; s++) {
      const int64_t at = (g.first + s) * g.p.length + k;
      std::copy(g.p.mean + at * n, g.p.mean + (at + 1) * n, &g.means[s * n]);
      observe_values(&y[s * n]);
      double unexplained = constant[s];
      for (int64_t r = 0; r < rank; r++) observed[s * n + r] = values[r], unexplained -= values[r] * values[r];
      g.least_squares[s] = g.p.least_squares[at] + std::max(unexplained, 0.0);
    }
    Component& component = g.components.all[0];
    for (int64_t r = 0; r < rank; r++) {
      g.steps.update(state, &c[r * n], component);
      for (int64_t s = 0; s < g.count; s++) g.move(component, &c[r * n], s, observed[s * n + r]);
    }
    g.steps.write(state, g.p.covariance + (g.group * g.p.length + k) * n * n);
    for (int64_t s = 0; s < g.count; s++) {
      const int64_t at = (g.first + s) * g.p.length + k;
      std::copy(&g.means[s * n], &g.means[(s + 1) * n], g.p.mean + at * n);
      g.p.least_squares[at] = g.least_squares[s];
    }
  }
};

// The Kalman filter, and its smoother where that is wanted.
template <int N> void run_filter(const Problem& p, Matrices<N> of, int64_t index) {
  Group<N> group(p, of, index);
  Smoother<N> smoother(group);
  const int64_t n = p.states;
  for (int64_t k = 0; k < p.length; k++) {
    if (k && !group.predict(k)) {
      p.overflow[index] = k;
      return;
    }
    if (p.predicted_mean) {
      std::copy(group.means.begin(), group.means.end(), p.predicted_mean + index * p.length * n + k * n);
      std::copy(group.state.p.begin(), group.state.p.end(), p.predicted_covariance + (index * p.length + k) * n * n);
    }
    if (!k && !group.steps.finite(group.state.p.data())) p.overflow[index] = 0;
    group.update(k);
    for (int64_t s = 0; s < group.count; s++) {
      const int64_t at = (group.first + s) * p.length + k;
      std::copy(&group.means[s * n], &group.means[(s + 1) * n], p.mean + at * n);
      if (p.least_squares) p.least_squares[at] = group.least_squares[s];
    }
    if (p.smooth) smoother.keep(k);
    group.steps.write(group.state, p.covariance + (index * p.length + k) * n * n);
  }
  if (p.smooth) smoother.run();
}

}  // namespace rfa
