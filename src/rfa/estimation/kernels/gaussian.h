// Gaussian knowledge of a state, x ~ N(m, P + c L L^T) for c -> infinity, as gaussian.py has it.
#pragma once
#include <limits>

#include "matrices.h"

namespace rfa {

constexpr double NO_PART = 1e-7;  // an observation that shows less of a diffuse direction shows nothing of it
constexpr double NO_TURN = 1e-16;  // of two products of entries, as linear_sde.py has it
constexpr double NO_CORRELATION = 1e-9;
constexpr double LITTLE_LEFT = 1e8;  // variance of a prediction over the noise, above which most digits of P go

template <int N> struct Covariance {
  Matrices<N> of;
  bool diffuse;
  double remaining;
  std::vector<double> p, root, origin;

  Covariance(Matrices<N> size, const double* covariance)
      : of(size), diffuse(false), remaining(0), p(covariance, covariance + size.nn()) {}

  // All directions diffuse, with a unit for each state.
  void set_diffuse(const std::vector<double>& units) {
    diffuse = true, remaining = of.n();
    root.assign(of.nn(), 0.0);
    for (int i = 0; i < of.n(); i++) root[i * of.n() + i] = units[i];
    origin = root;
  }

  bool unobserved() const { return diffuse && remaining == of.n(); }
};

// One component h x + e, e ~ N(0, 1): its gain k, the spread P h, the variance of its prediction.
struct Component {
  bool seen, shows;
  double variance, length;  // length: a^T a of the part of the diffuse directions that it shows
  double *gain, *spread, *shown;
};

// The steps of a filter, with working memory.
template <int N> struct Steps {
  using State = Covariance<N>;
  Matrices<N> of;
  std::vector<double> a, c, x, y;
  explicit Steps(Matrices<N> size) : of(size), a(of.nn()), c(of.nn()), x(of.n()), y(of.n()) {}

  // P -> Phi P Phi^T + V. While nothing was observed, P and L stay.
  void predict(State& s, const double* transition, const double* variance) {
    if (s.unobserved()) return;
    of.sandwich(transition, s.p.data(), a.data());
    for (int i = 0; i < of.nn(); i++) s.p[i] += variance[i];
    if (!s.diffuse) return;
    of.multiply(transition, s.root.data(), a.data()), of.copy(a.data(), s.root.data());
    of.multiply(transition, s.origin.data(), a.data()), of.copy(a.data(), s.origin.data());
  }

  // P -> F P F^T + r k k^T with F = I - k h^T, from P h, h P h and r: Joseph's form, in which no digits cancel. It is two
  // updates of rank 1, but where the observation leaves so little that P would not stay positive.
  void joseph(double* p, const double* row, const double* gain, const double* spread, double across, double noise = 1) {
    const bool little = across > LITTLE_LEFT * noise;
    if (little) {
      for (int i = 0; i < of.n(); i++)
        for (int j = 0; j < of.n(); j++) c[i * of.n() + j] = (i == j) - gain[i] * row[j];
      of.sandwich(c.data(), p, a.data());
      std::fill(y.begin(), y.end(), 0.0);
    } else {
      for (int i = 0; i < of.n(); i++)
        for (int j = 0; j < of.n(); j++) p[i * of.n() + j] -= gain[i] * spread[j];
      of.apply(p, row, y.data());  // F P h
    }
    for (int i = 0; i < of.n(); i++)
      for (int j = 0; j < of.n(); j++) p[i * of.n() + j] += (noise * gain[i] - y[i]) * gain[j];
    of.symmetrize(p);
  }

  double deviation(const State& s, int i) const {
    return std::sqrt(of.dot(&s.origin[i * of.n()], &s.origin[i * of.n()]));
  }

  void update(State& s, const double* row, Component& found) {
    found.seen = false, found.shows = false, found.variance = 1;
    for (int i = 0; i < of.n(); i++) found.seen |= row[i] != 0, found.gain[i] = 0;
    if (!found.seen) return;
    of.apply_transposed(s.p.data(), row, found.spread);  // P is symmetric
    found.variance = of.dot(row, found.spread) + 1;
    for (int i = 0; i < of.n(); i++) found.gain[i] = found.spread[i] / found.variance;
    if (s.diffuse) {
      of.apply_transposed(s.root.data(), row, found.shown);
      double most = 0;
      for (int i = 0; i < of.n(); i++) most += std::abs(row[i]) * deviation(s, i);
      found.length = of.dot(found.shown, found.shown);
      found.shows = found.length > NO_PART * most * (NO_PART * most);
    }
    if (found.shows) {
      of.apply(s.root.data(), found.shown, found.gain);
      for (int i = 0; i < of.n(); i++) found.gain[i] /= found.length;
      s.remaining -= 1;
      bool any = false;
      for (int i = 0; i < of.n(); i++)
        for (int j = 0; j < of.n(); j++) {
          double& entry = s.root[i * of.n() + j];
          entry = s.remaining > 0 ? entry - found.gain[i] * found.shown[j] : 0;
          any |= entry != 0;
        }
      s.diffuse = any;
    }
    joseph(s.p.data(), row, found.gain, found.spread, found.variance - 1);
  }

  // P with the infinities of diffuse directions. Returns whether each of them is a state.
  bool write(const State& s, double* out) {
    of.copy(s.p.data(), out);
    if (!s.diffuse) return true;
    bool known = true;
    for (int i = 0; i < of.n(); i++) x[i] = std::sqrt(of.dot(&s.root[i * of.n()], &s.root[i * of.n()]));
    of.multiply_transposed(s.root.data(), s.root.data(), a.data());
    for (int i = 0; i < of.n(); i++)
      for (int j = 0; j < of.n(); j++) {
        const double both = a[i * of.n() + j];
        const bool lost = x[i] > NO_PART * deviation(s, i) && x[j] > NO_PART * deviation(s, j);
        if (!lost || !(std::abs(both) > NO_CORRELATION * x[i] * x[j])) continue;
        out[i * of.n() + j] = std::copysign(std::numeric_limits<double>::infinity(), both);
        known &= i == j;
      }
    return known;
  }

  bool finite(const double* p) const {
    double sum = 0;
    for (int i = 0; i < of.nn(); i++) sum += p[i] * 0;
    return sum == 0;
  }
};

// Working memory for the components of a row.
struct Components {
  std::vector<double> memory;
  std::vector<Component> all;
  Components(int64_t components, int64_t n) : memory(size_t(3 * components * n)), all(size_t(components)) {
    for (int64_t i = 0; i < components; i++) {
      all[i].gain = &memory[3 * i * n], all[i].spread = all[i].gain + n, all[i].shown = all[i].spread + n;
    }
  }
};

}  // namespace rfa
