// Small dense matrices by rows, N x N. N = 0: the size is known only at run time.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lane.h"

namespace rfa {

template <int N> struct Matrices {
  static constexpr int SIZE = N;
  int size;
  explicit Matrices(int64_t n) : size(int(n)) {}
  int n() const { return N ? N : size; }
  int nn() const { return n() * n(); }

  void copy(const double* a, double* out) const { std::copy(a, a + nn(), out); }

  // out = a b. Zeros of a large a are passed over: transitions have many.
  void multiply(const double* a, const double* b, double* out) const {
    for (int i = 0; i < n(); i++) {
      for (int j = 0; j < n(); j++) out[i * n() + j] = 0;
      for (int k = 0; k < n(); k++)
        for (int j = 0; j < n() && (N || a[i * n() + k] != 0); j++) out[i * n() + j] += a[i * n() + k] * b[k * n() + j];
    }
  }

  // p -> a p a^T for a symmetric p, with working memory.
  void sandwich(const double* a, double* p, double* work) const {
    multiply(a, p, work);
    for (int i = 0; i < n(); i++)
      for (int j = 0; j < i; j++) std::swap(work[i * n() + j], work[j * n() + i]);
    for (int i = 0; i < n(); i++) {
      const int end = N ? N : i + 1;
      for (int j = 0; j < end; j++) p[i * n() + j] = 0;
      for (int k = 0; k < n(); k++)
        for (int j = 0; j < end && (N || a[i * n() + k] != 0); j++) p[i * n() + j] += a[i * n() + k] * work[k * n() + j];
    }
    for (int i = 0; i < n(); i++)
      for (int j = 0; j < i; j++) p[j * n() + i] = p[i * n() + j];
  }

  // out = a b^T
  void multiply_transposed(const double* a, const double* b, double* out) const {
    for (int i = 0; i < n(); i++)
      for (int j = 0; j < n(); j++) {
        double sum = 0;
        for (int k = 0; k < n(); k++) sum += a[i * n() + k] * b[j * n() + k];
        out[i * n() + j] = sum;
      }
  }

  // out = a^T b
  void transposed_multiply(const double* a, const double* b, double* out) const {
    for (int i = 0; i < nn(); i++) out[i] = 0;
    for (int k = 0; k < n(); k++)
      for (int i = 0; i < n(); i++)
        for (int j = 0; j < n(); j++) out[i * n() + j] += a[k * n() + i] * b[k * n() + j];
  }

  // out = a x, and out = a^T x
  void apply(const double* a, const double* x, double* out) const {
    for (int i = 0; i < n(); i++) out[i] = dot(a + i * n(), x);
  }
  void apply_transposed(const double* a, const double* x, double* out) const {
    for (int j = 0; j < n(); j++) out[j] = 0;
    for (int i = 0; i < n(); i++)
      for (int j = 0; j < n(); j++) out[j] += a[i * n() + j] * x[i];
  }

  double dot(const double* x, const double* y) const {
    double sum = 0;
    for (int i = 0; i < n(); i++) sum += x[i] * y[i];
    return sum;
  }

  void symmetrize(double* a) const {
    for (int i = 0; i < n(); i++)
      for (int j = 0; j < i; j++) a[i * n() + j] = a[j * n() + i] = (a[i * n() + j] + a[j * n() + i]) / 2;
  }

  // The lower factor of a symmetric matrix, in place. False where it is not positive definite.
  template <class T> Truth<T> cholesky(T* a) const {
    Truth<T> positive = T{} == T{};
    for (int j = 0; j < n(); j++) {
      T pivot = a[j * n() + j];
      for (int k = 0; k < j; k++) pivot -= a[j * n() + k] * a[j * n() + k];
      positive = positive & (pivot > T{});
      a[j * n() + j] = root(pivot);
      for (int i = j + 1; i < n(); i++) {
        T sum = a[i * n() + j];
        for (int k = 0; k < j; k++) sum -= a[i * n() + k] * a[j * n() + k];
        a[i * n() + j] = sum / a[j * n() + j];
      }
    }
    return positive;
  }

  // inverse = a^-1, with row pivots; a is overwritten.
  void invert(double* a, double* inverse) const {
    for (int i = 0; i < n(); i++)
      for (int j = 0; j < n(); j++) inverse[i * n() + j] = i == j;
    for (int k = 0; k < n(); k++) {
      int best = k;
      for (int i = k + 1; i < n(); i++)
        if (std::abs(a[i * n() + k]) > std::abs(a[best * n() + k])) best = i;
      for (int j = 0; best != k && j < n(); j++) {
        std::swap(a[k * n() + j], a[best * n() + j]);
        std::swap(inverse[k * n() + j], inverse[best * n() + j]);
      }
      for (int i = k + 1; i < n(); i++) {
        const double factor = a[i * n() + k] / a[k * n() + k];
        for (int j = k; j < n(); j++) a[i * n() + j] -= factor * a[k * n() + j];
        for (int j = 0; j < n(); j++) inverse[i * n() + j] -= factor * inverse[k * n() + j];
      }
    }
    for (int i = n() - 1; i >= 0; i--) {
      for (int k = i + 1; k < n(); k++)
        for (int j = 0; j < n(); j++) inverse[i * n() + j] -= a[i * n() + k] * inverse[k * n() + j];
      for (int j = 0; j < n(); j++) inverse[i * n() + j] /= a[i * n() + i];
    }
  }
};

// Calls `run(Matrices<N>)` with the size known to the compiler where it is small.
template <class F> void with_size(int64_t n, F run) {
  switch (n) {
    case 1: return run(Matrices<1>(n));
    case 2: return run(Matrices<2>(n));
    case 3: return run(Matrices<3>(n));
    case 4: return run(Matrices<4>(n));
    case 6: return run(Matrices<6>(n));
    default: return run(Matrices<0>(n));
  }
}

}  // namespace rfa
