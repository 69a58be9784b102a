// Phi(dt) = exp(A dt) and V(dt) = integral_0^dt exp(A s) Q exp(A s)^T ds of many lags.
//
// Over a short lag h, with |A| h <= 1/2, both are power series:
//   Phi = sum_k A^k h^k / k!,    V = sum_k M_k h^(k+1) / (k+1)!,    M_0 = Q, M_k+1 = A M_k + M_k A^T
// Longer lags are doubled: V(2h) = V(h) + Phi(h) V(h) Phi(h)^T, Phi(2h) = Phi(h)^2.
#pragma once
#include <exception>

#include "matrices.h"

namespace rfa {

struct Lags {
  int64_t models, count, states, threads;
  const double *dynamics, *diffusion, *lags;  // A, Q (models, n, n), dt (count,)
  double *transition, *variance;              // (models, count, n, n)
};

constexpr int TERMS = 18;  // (2 |A| h)^18 / 18! < 1e-15 for |A| h <= 1/2

template <int N> struct Discretization {
  Matrices<N> of;
  std::vector<double> powers, moments;  // A^k and M_k, of the dynamics times the unit of time
  double norm = 0;
  std::vector<double> a, b, d;

  Discretization(const double* dynamics, const double* diffusion, Matrices<N> size)
      : of(size), powers(size_t((TERMS + 1) * of.nn())), moments(powers.size()), a(of.nn()), b(of.nn()),
        d(of.nn()) {
    for (int j = 0; j < of.n(); j++) {
      double sum = 0;
      for (int i = 0; i < of.n(); i++) sum += std::abs(dynamics[i * of.n() + j]);
      norm = std::max(norm, sum);
    }
    norm = norm > 0 ? norm : 1;
    // powers of A / |A|, so that none overflows
    for (int i = 0; i < of.nn(); i++) d[i] = dynamics[i] / norm;
    for (int i = 0; i < of.n(); i++) powers[i * of.n() + i] = 1;
    of.copy(diffusion, moments.data());
    for (int k = 0; k < TERMS; k++) {
      of.multiply(d.data(), &powers[k * of.nn()], &powers[(k + 1) * of.nn()]);
      moment(&moments[k * of.nn()], &moments[(k + 1) * of.nn()]);
    }
  }

  // out = A M + (A M)^T for a symmetric M
  void moment(const double* m, double* out) {
    of.multiply(d.data(), m, a.data());
    for (int i = 0; i < of.n(); i++)
      for (int j = 0; j < of.n(); j++) out[i * of.n() + j] = a[i * of.n() + j] + a[j * of.n() + i];
  }

  // Phi and V of a lag.
  void compute(double lag, double* phi, double* variance) {
    int doublings = 0;
    double h = lag * norm;
    if (!std::isfinite(h)) {
      std::fill(phi, phi + of.nn(), NAN), std::fill(variance, variance + of.nn(), NAN);
      return;
    }
    for (; std::abs(h) > 0.5; doublings++) h /= 2;
    std::fill(phi, phi + of.nn(), 0.0), std::fill(variance, variance + of.nn(), 0.0);
    double factor = 1;  // h^k / k!
    for (int k = 0; k <= TERMS; k++) {
      const double* power = &powers[k * of.nn()];
      const double* moment = &moments[k * of.nn()];
      const double next = factor * h / (k + 1);
      for (int i = 0; i < of.nn(); i++) phi[i] += factor * power[i], variance[i] += next / norm * moment[i];
      factor = next;
    }
    for (int step = 0; step < doublings; step++) {
      of.multiply(phi, variance, a.data());
      of.multiply_transposed(a.data(), phi, b.data());
      for (int i = 0; i < of.nn(); i++) variance[i] += b[i];
      of.multiply(phi, phi, a.data());
      of.copy(a.data(), phi);
    }
    of.symmetrize(variance);
  }

};

// States that some entry of A or Q joins, in any model. Others move independently of each other.
inline std::vector<std::vector<int64_t>> joined_states(int64_t models, int64_t n, const double* dynamics,
                                                       const double* diffusion) {
  std::vector<int64_t> group(size_t(n), 0);
  for (int64_t i = 0; i < n; i++) group[i] = i;
  for (int64_t at = 0; at < models * n * n; at++) {
    const int64_t from = group[at / n % n], to = group[at % n];
    if (from == to || (dynamics[at] == 0 && diffusion[at] == 0)) continue;
    for (int64_t& one : group) one = one == from ? to : one;
  }
  std::vector<std::vector<int64_t>> found;
  for (int64_t g = 0; g < n; g++) {
    std::vector<int64_t> members;
    for (int64_t i = 0; i < n; i++)
      if (group[i] == g) members.push_back(i);
    if (!members.empty()) found.push_back(members);
  }
  return found;
}

// Rows and columns of some states.
inline std::vector<double> selected(const double* matrix, int64_t n, const std::vector<int64_t>& states) {
  std::vector<double> found;
  for (int64_t i : states)
    for (int64_t j : states) found.push_back(matrix[i * n + j]);
  return found;
}

}  // namespace rfa
