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
  const Lags& given;
  Matrices<N> of;
  std::vector<double> powers, moments;  // A^k and M_k, of the dynamics times the unit of time
  double norm = 0;
  std::vector<double> a, b, d;

  Discretization(const Lags& lags, Matrices<N> size)
      : given(lags), of(size), powers(size_t((TERMS + 1) * of.nn())), moments(powers.size()), a(of.nn()), b(of.nn()),
        d(of.nn()) {
    const double* dynamics = given.dynamics;
    for (int j = 0; j < of.n(); j++) {
      double sum = 0;
      for (int i = 0; i < of.n(); i++) sum += std::abs(dynamics[i * of.n() + j]);
      norm = std::max(norm, sum);
    }
    norm = norm > 0 ? norm : 1;
    // powers of A / |A|, so that none overflows
    for (int i = 0; i < of.nn(); i++) d[i] = dynamics[i] / norm;
    for (int i = 0; i < of.n(); i++) powers[i * of.n() + i] = 1;
    of.copy(given.diffusion, moments.data());
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

  void run() {
    for (int64_t k = 0; k < given.count; k++)
      compute(given.lags[k], given.transition + k * of.nn(), given.variance + k * of.nn());
  }
};

}  // namespace rfa
