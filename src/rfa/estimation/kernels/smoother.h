// The two-filter smoother: the filter's states, combined with the information of all later observations.
#pragma once
#include <exception>

#include "filter.h"

namespace rfa {

constexpr double ROUNDING = 1e-14;  // an eigenvalue of an information matrix at a unit diagonal that comes from rounding

template <int N> struct Smoother {
  Group<N>& g;
  Matrices<N> of;
  const int64_t n;
  std::vector<double> covariances, unused;
  std::vector<Covariance<N>> diffuse;  // the first states, while a direction is diffuse
  std::vector<double> j, y, constant;  // later information: J of the group, y and c of each series
  std::vector<double> a, b, c, d, scale, vector, mean;

  explicit Smoother(Group<N>& group)
      : g(group), of(g.steps.of), n(g.n), unused(of.nn()), j(of.nn()), y(size_t(g.count * n)),
        constant(size_t(g.count)), a(of.nn()), b(of.nn()), c(of.nn()), d(of.nn()), scale(n), vector(n), mean(n) {
    if (g.p.smooth) covariances.resize(size_t(g.p.length * n * n));
  }

  double* scratch() { return unused.data(); }

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

  // The later information as an observation with unit noise and rows L^-1 U^T J, c, whose values are d y.
  void observe() {
    for (int r = 0; r < of.n(); r++) scale[r] = j[r * n + r] > 0 ? 1 / std::sqrt(j[r * n + r]) : 1;
    for (int r = 0; r < of.n(); r++)
      for (int q = 0; q < of.n(); q++) a[r * n + q] = scale[r] * scale[q] * j[r * n + q];
    of.symmetrize(a.data());
    of.copy(a.data(), b.data());
    of.eigen(b.data(), c.data());  // eigenvalues on the diagonal of b, U in c
    double most = std::numeric_limits<double>::min();
    for (int r = 0; r < of.n(); r++) most = std::max(most, b[r * n + r]);
    for (int r = 0; r < of.n(); r++) {
      vector[r] = b[r * n + r] > ROUNDING * most ? b[r * n + r] : 0;  // 0: not informative
      for (int q = 0; q < of.n(); q++) d[r * n + q] = vector[r] ? c[q * n + r] : 0;  // the rows of U^T
    }
    of.multiply(d.data(), a.data(), c.data());             // projected, U^T J
    of.multiply_transposed(c.data(), d.data(), a.data());  // U^T J U
    for (int r = 0; r < of.n(); r++) a[r * n + r] += !vector[r];
    of.symmetrize(a.data());
    if (!of.cholesky(a.data())) {  // rounding, where the eigenvalues differ by more than the digits
      std::fill(a.begin(), a.end(), 0.0);
      for (int r = 0; r < of.n(); r++) a[r * n + r] = vector[r] ? std::sqrt(vector[r]) : 1;
    }
    of.solve_lower(a.data(), c.data());
    for (int r = 0; r < of.n(); r++)
      for (int q = 0; q < of.n(); q++) c[r * n + q] /= scale[q], d[r * n + q] *= scale[q];
    of.solve_lower(a.data(), d.data());
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
      double left = constant[s];
      for (int r = 0; r < of.n(); r++) {
        const double z = of.dot(&d[r * n], &y[s * n]);
        left -= z * z;
      }
      g.least_squares[s] = g.p.least_squares[at] + std::max(left, 0.0);
    }
    Component& component = g.components.all[0];
    for (int r = 0; r < of.n(); r++) {
      g.steps.update(state, &c[r * n], component);
      if (component.seen)
        for (int64_t s = 0; s < g.count; s++) g.move(component, &c[r * n], s, of.dot(&d[r * n], &y[s * n]));
    }
    g.steps.write(state, g.p.covariance + (g.group * g.p.length + k) * n * n);
    for (int64_t s = 0; s < g.count; s++) {
      const int64_t at = (g.first + s) * g.p.length + k;
      std::copy(&g.means[s * n], &g.means[(s + 1) * n], g.p.mean + at * n);
      g.p.least_squares[at] = g.least_squares[s];
    }
  }
};

}  // namespace rfa
