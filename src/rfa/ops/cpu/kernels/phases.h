// cos(w t) and sin(w t): the phase in double, reduced to an eighth of a turn, then polynomials in float (Cephes).
#pragma once
#include "functions.h"
#include "problem.h"

namespace rfa {

struct PhasesProblem {
  int64_t batch, heads, length, modes, threads;
  const double *times, *frequency;  // (batch, length) and (heads, modes)
  float *cos, *sin;                 // (batch, heads, length, modes)
};

constexpr double QUARTERS = 0.63661977236758134;   // 2 / pi: quarter turns in a radian
constexpr double WHOLE_DOUBLE = 6755399441055744;  // 1.5 * 2^52, as ROUNDER in functions.h

RFA_INLINE void cos_sin(Doubles quarters, Floats* cos, Floats* sin) {
  const Doubles turns = (quarters * 0.25 + WHOLE_DOUBLE) - WHOLE_DOUBLE, rest = quarters - turns * 4.0;  // [-2, 2]
  const Floats quarter = (narrow(rest) + ROUNDER) - ROUNDER;
  const Floats x = narrow(rest - widen(quarter)) * 1.57079632679f, z = x * x;
  const Floats s = ((z * -1.9515295891e-4f + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * x + x;
  const Floats c = ((z * 2.443315711809948e-5f - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - z * 0.5f + 1.0f;
  const Floats size = magnitude(quarter);
  const Ints odd = size == 1.0f, half = size > 1.5f;
  *cos = choose(odd, choose(quarter > 0.0f, -s, s), choose(half, -c, c));
  *sin = choose(odd, choose(quarter > 0.0f, c, -c), choose(half, -s, s));
}

// One head of one sample.
static inline void head_phases(const PhasesProblem& p, int64_t index) {
  const double *times = p.times + index / p.heads * p.length, *given = p.frequency + index % p.heads * p.modes;
  const int64_t padded = round_up(p.modes, LANES);
  Buffer<double> frequency(padded);
  Buffer<float> row(2 * padded);
  for (int64_t m = 0; m < p.modes; m++) frequency[m] = given[m] * QUARTERS;
  for (int64_t t = 0; t < p.length; t++) {
    for (int64_t m = 0; m < padded; m += LANES) {
      Floats cos, sin;
      cos_sin(load(frequency + m) * times[t], &cos, &sin);
      store(row + m, cos);
      store(row + padded + m, sin);
    }
    const int64_t at = (index * p.length + t) * p.modes;
    std::memcpy(p.cos + at, row, p.modes * sizeof(float));
    std::memcpy(p.sin + at, row + padded, p.modes * sizeof(float));
  }
}

}  // namespace rfa
