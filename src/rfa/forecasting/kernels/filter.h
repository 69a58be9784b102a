// A Kalman filter of a level, a slope or an autoregression, and the coefficients of a season and of regressors.
//
//     y(t) = l(t) + v(t) + z(t)' a(t) + error,     l: level, with a damped slope u;  v: autoregression, where there is
//     one
//
// Covariances are in units of the error's variance, which the filter learns. The error of a reading has one of a few
// scales: the gain is the mean over them (docs/theory.md, the recursive start).
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "constants.h"

namespace rfa {

// One model: what a point of a lattice stands for.
struct Model {
  bool season = false;
  double damping = 0;        // of the slope over one step; 0: there is no slope
  double memory = 0;         // of the autoregression over one step; 0: there is none
  double turn = 0;           // its angle over one step, which makes a cycle of it
  double level_noise = 0.1;  // variances of a step, in units of the error's
  double slope_noise = 0;
  double memory_noise = 0;
  double season_noise = 0;  // of each coefficient
  double scale = 1;         // variance of a one-step error in the long run, in units of the error's
  int base() const { return memory > 0 ? turn > 0 ? 4 : 3 : 2; }  // the states before the coefficients
};

// What one lag does to level l, slope u, autoregression v.
struct Lag {
  double lag = -1, damped = 1, carried = 0;  // u -> damped u, l -> l + carried u
  double ll = 0, lu = 0, uu = 0, season = 0, kept = 1, turned = 0, vv = 0;

  Lag(const Model& m, double of) : lag(of) {
    const double f = m.damping;
    if (f > 0) {
      damped = std::pow(f, of);
      const double one = (1 - damped) / (1 - f), two = (1 - damped * damped) / (1 - f * f), ratio = f / (1 - f);
      carried = ratio * (1 - damped);
      uu = m.slope_noise * two, lu = m.slope_noise * ratio * (one - two);
      ll = m.slope_noise * ratio * ratio * std::max(of - 2 * one + two, 0.0);
      if (uu > 0) ll = std::max(ll, lu * lu / uu);
    }
    if (m.memory > 0)
      kept = std::pow(m.memory, of), vv = m.memory_noise * (1 - kept * kept) / (1 - m.memory * m.memory);
    if (m.turn > 0) turned = kept * std::sin(m.turn * of), kept *= std::cos(m.turn * of);
    ll += m.level_noise * of, season = m.season_noise * of;
  }
};

struct Forecast {
  double mean = 0, variance = 0;
};

template <int N> struct State {
  static constexpr int CAPACITY = N ? std::max(N, 4) : MOST_STATES;
  std::array<double, CAPACITY> x{};
  std::array<double, CAPACITY * CAPACITY> p{};
  std::array<double, SCALES> counts = SCALE_COUNTS;
  double squares = 0, degrees = 1;  // the error's variance is squares / degrees
  double variance() const { return squares / degrees; }
};

// What one reading says.
struct Reading {
  double innovation = 0, variance = 1, evidence = 0, square = 0;
  double weight = 1, gain = 1, scatter = 0;  // in the error's variance; in the state, and how uncertain that is
  std::array<double, SCALES> probability{};
};

template <int N> struct Filter {
  static constexpr int C = State<N>::CAPACITY;
  Model model;
  int size;
  bool robust;
  State<N> state, challenger;
  double odds = NO_CHALLENGER, evidence = 0;
  int64_t readings = 0, begun = -1, jumped = -1,
          trusted = 0;  // how many; which one began the challenger; and that again, when they change places
  Lag last{Model(), 0};
  std::array<double, C> ph{}, other_ph{};

  Filter(const Model& m, int states, bool is_robust) : model(m), size(states), robust(is_robust) {}
  int n() const { return N ? N : size; }

  void predict(double lag) {
    if (lag != last.lag) last = Lag(model, lag);
    predict(state);
    if (odds > NO_CHALLENGER) predict(challenger);
  }

  void predict(State<N>& s) const {
    double *p0 = &s.p[0], *p1 = &s.p[C];
    const double g = last.carried, f = last.damped;
    s.x[0] += g * s.x[1], s.x[1] *= f;
    for (int j = 0; j < n(); j++) p0[j] += g * p1[j], p1[j] *= f;
    for (int i = 0; i < n(); i++) s.p[i * C] += g * s.p[i * C + 1], s.p[i * C + 1] *= f;
    p0[0] += last.ll, p0[1] += last.lu, p1[0] += last.lu, p1[1] += last.uu;
    const int base = model.base();
    if (base > 2) {
      auto turn = [&](double* v, int step) {
        const double first = v[0];
        v[0] *= last.kept;
        if (base > 3) v[0] += last.turned * v[step], v[step] = last.kept * v[step] - last.turned * first;
      };
      turn(&s.x[2], 1);
      for (int j = 0; j < n(); j++) turn(&s.p[2 * C + j], C);
      for (int i = 0; i < n(); i++) turn(&s.p[i * C + 2], 1);
      for (int i = 2; i < base; i++) s.p[i * C + i] += last.vv;
    }
    for (int i = base; i < n() && last.season > 0; i++) s.p[i * C + i] += last.season;
  }

  double value(const State<N>& s, const double* z) const {
    const int base = model.base();
    double sum = s.x[0] + (base > 2 ? s.x[2] : 0);
    for (int j = base; j < n(); j++) sum += s.x[j] * z[j - base];
    return sum;
  }

  // The mean of the reading that is filtered next.
  double value(const double* z) const { return value(state, z); }

  void look(const State<N>& s, const double* z, double y, std::array<double, C>& h, Reading& r) const {
    const int base = model.base();
    for (int i = 0; i < n(); i++) h[i] = s.p[i];
    for (int i = 0; i < n() && base > 2; i++) h[i] += s.p[2 * C + i];
    for (int j = base; j < n(); j++)
      for (int i = 0; i < n(); i++) h[i] += z[j - base] * s.p[j * C + i];
    double f = h[0] + (base > 2 ? h[2] : 0);
    for (int j = base; j < n(); j++) f += z[j - base] * h[j];
    r.variance = std::max(f, 0.0) + 1;
    r.innovation = y - value(s, z);
    weigh(s, r);
  }

  void weigh(const State<N>& s, Reading& r) const {
    const double total = r.variance * s.variance();
    r.square = r.innovation * r.innovation / total;
    if (!robust) {
      r.weight = r.gain = 1, r.scatter = 0, r.evidence = -0.5 * (r.square + std::log(total));
      return;
    }
    double sum = 0, first = 0, second = 0, all = 0, weight = 0;
    for (double count : s.counts) all += count;
    for (int i = 0; i < SCALES; i++) {
      const double scale = i == SCALES - 1 ? std::max(SCALE[i], r.square) : SCALE[i];
      const double p = s.counts[i] / std::sqrt(scale) * std::exp(-0.5 * r.square / scale);
      const double moved = MOVED_SHARE[i], rest = (1 - moved) / scale;
      r.probability[i] = p, sum += p, weight += p / scale, first += p * (moved + rest),
      second += p * (moved + rest / scale);
    }
    for (double& p : r.probability) p /= sum;
    r.weight = weight / sum, r.gain = first / sum, r.scatter = std::max(second / sum - r.gain * r.gain, 0.0);
    r.evidence = std::log(sum / all) - 0.5 * std::log(total);
  }

  void use(State<N>& s, const std::array<double, C>& h, const Reading& r) const {
    const double move = r.gain * r.innovation / r.variance;
    const double shrink = (r.gain - r.scatter * r.square) / r.variance;
    for (int i = 0; i < n(); i++) s.x[i] += h[i] * move;
    for (int i = 0; i < n(); i++) {
      const double part = h[i] * shrink;
      for (int j = 0; j < n(); j++) s.p[i * C + j] -= part * h[j];
    }
    for (int i = 0; i < SCALES && robust; i++) s.counts[i] += r.probability[i];
    const double forget = s.degrees > MOST_DEGREES ? MOST_DEGREES / s.degrees : 1;
    s.squares = forget * (s.squares + r.weight * r.innovation * r.innovation / r.variance);
    s.degrees = forget * (s.degrees + 1);
  }

  // The level is less certain, until the reading is expected, and what follows may move more.
  static void inflate(State<N>& s, const Reading& r) { s.p[0] += r.square * r.variance, s.squares *= NEW_VARIANCE; }

  // A reading. Returns what it says under the filter that was there before.
  Reading update(const double* z, double y) {
    Reading r, other;
    look(state, z, y, ph, r);
    const Reading before = r;
    evidence += r.evidence;
    bool active = odds > NO_CHALLENGER;
    if (active) {
      look(challenger, z, y, other_ph, other);
      const double change = other.evidence - r.evidence;
      if (trusted > 0 && other.weight < REFUSED) other.weight = other.gain = 1, other.scatter = 0;
      trusted--;
      odds += change;
      if (odds > 0) {  // the level has jumped; it may come back
        std::swap(state, challenger), std::swap(ph, other_ph), std::swap(r, other);
        odds = -odds, jumped = begun, trusted = 0;
      }
      if (odds < ABANDONED_ODDS || std::abs(change) < SAME_ODDS) { odds = NO_CHALLENGER, active = false; }
    }
    if (robust && !active && r.weight < REFUSED) {
      challenger = state;
      inflate(challenger, r);
      odds = CHALLENGER_ODDS, begun = readings, trusted = TRUSTED;
      Reading jump;
      look(challenger, z, y, other_ph, jump);
      jump.weight = jump.gain = 1, jump.scatter = 0;
      jump.probability.fill(0), jump.probability[0] = 1;
      use(challenger, other_ph, jump);
    } else if (active) {
      use(challenger, other_ph, other);
    }
    use(state, ph, r);
    readings++;
    return before;
  }

  // A reading after a lag.
  Forecast forecast(const Lag& ahead, const double* z) const {
    const State<N>& s = state;
    std::array<double, C> v{};
    const int base = model.base();
    v[0] = 1, v[1] = ahead.carried;
    if (base > 2) v[2] = ahead.kept;
    if (base > 3) v[3] = ahead.turned;
    double length = 0;
    for (int j = base; j < n(); j++) v[j] = z[j - base], length += v[j] * v[j];
    double sum = 0, square = 0;
    for (int i = 0; i < n(); i++) {
      double row = 0;
      for (int j = 0; j < n(); j++) row += s.p[i * C + j] * v[j];
      square += row * v[i], sum += s.x[i] * v[i];
    }
    return {sum, (std::max(square, 0.0) + ahead.ll + ahead.vv + ahead.season * length + 1) * s.variance()};
  }
};

// What is carried on from the last reading, as numbers one after the other.
struct Archive {
  std::vector<double> numbers;
  size_t at = 0;
  bool reading = false;

  void pass(double& x) {
    if (reading) x = numbers.at(at++);
    else numbers.push_back(x);
  }
  template <class Integer> void pass_integer(Integer& x) {
    double number = double(x);
    pass(number), x = Integer(number);
  }
  void pass(Model& m) {
    pass_integer(m.season);
    for (double* x :
         {&m.damping, &m.memory, &m.turn, &m.level_noise, &m.slope_noise, &m.memory_noise, &m.season_noise, &m.scale})
      pass(*x);
  }
  template <int N> void pass(State<N>& s, int n) {
    constexpr int C = State<N>::CAPACITY;
    for (int i = 0; i < n; i++) {
      pass(s.x[i]);
      for (int j = 0; j <= i; j++) pass(s.p[i * C + j]), s.p[j * C + i] = s.p[i * C + j];
    }
    for (double& count : s.counts) pass(count);
    pass(s.squares), pass(s.degrees);
  }
  template <int N> void pass(Filter<N>& f) {
    pass(f.state, f.n()), pass(f.evidence), pass(f.odds), pass_integer(f.trusted);
    if (f.odds > NO_CHALLENGER) pass(f.challenger, f.n());
  }
};

// Calls with the number of states known to the compiler where it is usual: without a season, of quarters, of months.
template <class F> auto with_states(int n, F call) {
  switch (n) {
    case 2: return call(std::integral_constant<int, 2>());
    case 3: return call(std::integral_constant<int, 3>());
    case 4: return call(std::integral_constant<int, 4>());
    case 5: return call(std::integral_constant<int, 5>());
    case 6: return call(std::integral_constant<int, 6>());
    case 13: return call(std::integral_constant<int, 13>());
    case 14: return call(std::integral_constant<int, 14>());
    default: return call(std::integral_constant<int, 0>());
  }
}

}  // namespace rfa
