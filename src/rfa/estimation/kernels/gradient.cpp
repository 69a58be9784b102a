// The gradient of the log density of the rows: the filter forward, then its steps in reverse.
//
// The gain is the one that minimises P' = F P F^T + k k^T, F = I - k h^T, so P' has no slope along it:
//   dP = F^T dP' F,  and with h:  dh = -2 P F^T dP' k
// m' = m + k e adds, by dk of k = P h / f:  dP += F^T dk h^T / f,  dh += (P F^T dk - P h (k dk)) / f
#include <exception>

#include "filter.h"

namespace rfa {

template <int N> struct Gradient {
  Group<N> g;
  const Problem& p;
  Matrices<N> of;
  const int64_t n, m;
  std::vector<double> covariances, means;  // predicted, at each time index
  std::vector<int64_t> counted;
  std::vector<Covariance<N>> diffuse;  // predicted, while a direction is diffuse
  std::vector<double> d_covariance, d_mean, d_root;
  std::vector<double> a, b, u, v, w, q, r;
  std::vector<Covariance<N>> before;  // the state before each component of a row
  std::vector<double> means_before;

  Gradient(const Problem& problem, Matrices<N> size, int64_t index)
      : g(problem, size, index), p(problem), of(size), n(p.states), m(p.components),
        covariances(size_t(p.length * n * n)), means(size_t(p.length * g.count * n)), counted(size_t(p.length)),
        d_covariance(of.nn()), d_mean(size_t(g.count * n)), d_root(of.nn()), a(of.nn()), b(of.nn()),
        u(n), v(n), w(n), q(n), r(n), before(size_t(m + 1), g.state), means_before(size_t((m + 1) * g.count * n)) {}

  void run() {
    bool known = !p.diffuse;
    for (int64_t k = 0; k < p.length; k++) {
      if (k) g.predict(k);
      of.copy(g.state.p.data(), &covariances[k * n * n]);
      std::copy(g.means.begin(), g.means.end(), &means[k * g.count * n]);
      if (g.state.diffuse) diffuse.push_back(g.state);  // directions are known once and for all
      g.update(k, nullptr);
      counted[k] = known && !g.shows();
      known = !g.state.diffuse || g.steps.write(g.state, a.data());
    }
    forward(p.length - 1);
    for (int64_t k = p.length - 1; k >= 0; k--) {
      for (int64_t i = m - 1; i >= 0; i--) component(k, i);
      if (k) forward(k - 1), back(k);
    }
    std::copy(d_covariance.begin(), d_covariance.end(), p.grad_covariance + g.group * n * n);
    std::copy(d_mean.begin(), d_mean.end(), p.grad_mean + g.first * n);
  }

  // The predicted state at k, as the filter had it.
  void restore(int64_t k) {
    if (k < int64_t(diffuse.size())) g.state = diffuse[k];
    else of.copy(&covariances[k * n * n], g.state.p.data()), g.state.diffuse = false;
    std::copy(&means[k * g.count * n], &means[(k + 1) * g.count * n], g.means.begin());
  }

  // The components of the row at k once more. The state before each stays.
  void forward(int64_t k) {
    restore(k);
    for (int64_t i = 0; i < m; i++) {
      before[i] = g.state;
      std::copy(g.means.begin(), g.means.end(), &means_before[i * g.count * n]);
      Component& found = g.components.all[i];
      g.steps.update(g.state, g.row(k, i), found);
      if (found.seen)
        for (int64_t s = 0; s < g.count; s++) g.move(found, g.row(k, i), s, g.values(s, k)[i]);
    }
  }

  // d -> F^T d F and u = d' k, for a symmetric d, F = I - k h^T.
  void around(std::vector<double>& d, const double* row, const double* gain) {
    of.apply(d.data(), gain, u.data());
    const double both = of.dot(gain, u.data());
    for (int i = 0; i < of.n(); i++)
      for (int j = 0; j < of.n(); j++)
        d[i * of.n() + j] += row[i] * row[j] * both - row[i] * u[j] - u[i] * row[j];
  }

  // From the state after component i of the row at k to the state before it.
  void component(int64_t k, int64_t i) {
    const Component& one = g.components.all[i];
    if (!one.seen) return;
    const Covariance<N>& state = before[i];
    const double* row = g.row(k, i);
    double* d_row = p.grad_rows + ((g.group * p.patterns + g.pattern(k)) * m + i) * n;
    double slope = 0;  // of the density, along the variance
    std::fill(w.begin(), w.end(), 0.0);  // of the gain
    for (int64_t s = 0; s < g.count; s++) {
      const double* mean = &means_before[(i * g.count + s) * n];
      const double z = g.values(s, k)[i], e = z - of.dot(row, mean), f = one.variance;
      const double weight = counted[k] && !one.shows ? p.grad_density[(g.first + s) * p.length + k] : 0;
      double* d = &d_mean[s * n];
      for (int j = 0; j < of.n(); j++) w[j] += d[j] * e;
      const double d_innovation = of.dot(d, one.gain) - weight * e / f;
      slope += weight * (e * e / f - 1) / f / 2;
      p.grad_values[((g.first + s) * p.length + k) * m + i] += d_innovation;
      for (int j = 0; j < of.n(); j++) d_row[j] -= d_innovation * mean[j], d[j] -= d_innovation * row[j];
    }
    if (one.shows) return shown(state, row, one, d_row);
    around(d_covariance, row, one.gain);
    // u - h (k u) is F^T dP' k, and v is F^T dk / f
    const double along = of.dot(one.gain, u.data()), turned = of.dot(one.gain, w.data()), f = one.variance;
    for (int j = 0; j < of.n(); j++) v[j] = (w[j] - row[j] * turned) / f;
    for (int i = 0; i < of.n(); i++)
      for (int j = 0; j < of.n(); j++)
        d_covariance[i * of.n() + j] += (v[i] * row[j] + row[i] * v[j]) / 2 + slope * row[i] * row[j];
    for (int j = 0; j < of.n(); j++) v[j] -= 2 * (u[j] - row[j] * along);
    of.apply(state.p.data(), v.data(), q.data());
    for (int j = 0; j < of.n(); j++) d_row[j] += q[j] + one.spread[j] * (2 * slope - turned / f);
  }

  // A component that shows a diffuse direction: k = L a / a^T a, a = L^T h, L' = L - k a^T. P' has a slope along k:
  //   dk += 2 dP' k - 2 dP' F P h
  void shown(const Covariance<N>& state, const double* row, const Component& one, double* d_row) {
    const double across = of.dot(row, one.spread);
    for (int j = 0; j < of.n(); j++) v[j] = one.spread[j] - one.gain[j] * across;
    of.apply(d_covariance.data(), v.data(), q.data());
    around(d_covariance, row, one.gain);
    const double along = of.dot(one.gain, u.data());
    for (int j = 0; j < of.n(); j++) v[j] = u[j] - row[j] * along, w[j] += 2 * (u[j] - q[j]);
    of.apply(state.p.data(), v.data(), q.data());
    for (int j = 0; j < of.n(); j++) d_row[j] -= 2 * q[j];
    if (state.remaining <= 1) std::fill(d_root.begin(), d_root.end(), 0.0);  // L' is zero
    of.apply(d_root.data(), one.shown, q.data());
    for (int j = 0; j < of.n(); j++) w[j] -= q[j];
    of.apply_transposed(state.root.data(), w.data(), r.data());
    of.apply_transposed(d_root.data(), one.gain, q.data());
    const double both = of.dot(one.gain, w.data());
    for (int j = 0; j < of.n(); j++) r[j] = (r[j] - 2 * one.shown[j] * both) / one.length - q[j];  // of a
    for (int i = 0; i < of.n(); i++)
      for (int j = 0; j < of.n(); j++) d_root[i * of.n() + j] += w[i] * one.shown[j] / one.length + row[i] * r[j];
    of.apply(state.root.data(), r.data(), q.data());
    for (int j = 0; j < of.n(); j++) d_row[j] += q[j];
  }

  // From the predicted state at k to the state after the row before it, which `g` has.
  void back(int64_t k) {
    const double* transition = p.transition + g.lag(k) * n * n;
    double* d_transition = p.grad_transition + (g.group * p.lags + g.lag(k)) * n * n;
    double* d_variance = p.grad_variance + (g.group * p.lags + g.lag(k)) * n * n;
    for (int64_t s = 0; s < g.count; s++) {
      double* d = &d_mean[s * n];
      for (int i = 0; i < of.n(); i++)
        for (int j = 0; j < of.n(); j++) d_transition[i * of.n() + j] += d[i] * g.means[s * n + j];
      of.apply_transposed(transition, d, q.data());
      std::copy(q.begin(), q.end(), d);
    }
    if (g.state.unobserved()) return;
    of.multiply(d_covariance.data(), transition, a.data());
    of.multiply(a.data(), g.state.p.data(), b.data());
    for (int i = 0; i < of.nn(); i++) d_transition[i] += 2 * b[i], d_variance[i] += d_covariance[i];
    of.transposed_multiply(transition, a.data(), d_covariance.data());
    of.symmetrize(d_covariance.data());
    if (!g.state.diffuse) return;
    of.multiply_transposed(d_root.data(), g.state.root.data(), a.data());
    for (int i = 0; i < of.nn(); i++) d_transition[i] += a[i];
    of.transposed_multiply(transition, d_root.data(), a.data());
    of.copy(a.data(), d_root.data());
  }
};

}  // namespace rfa

// As rfa_filter. The caller has filled all gradients with zeros.
extern "C" int rfa_filter_gradient(const rfa::Problem* p) {
  int failed = 0;
#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
  for (int64_t index = 0; index < p->covariances; index++) try {
      rfa::with_size(p->states, [&](auto of) { rfa::Gradient<decltype(of)::SIZE>(*p, of, index).run(); });
    } catch (const std::exception&) {
#pragma omp atomic write
      failed = 1;
    }
  return failed;
}
