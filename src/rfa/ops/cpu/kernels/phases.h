// cos(w t) and sin(w t): the phase in double, reduced to an eighth of a turn, then polynomials in float (Cephes).
#pragma once
#include <algorithm>

#include "functions.h"
#include "problem.h"

namespace rfa {

struct PhasesProblem {
  int64_t batch, heads, length, modes, time_heads, threads;
  const double *times, *frequency;  // (batch, time_heads, length), time_heads 1 or heads; (heads, modes)
  float *cos, *sin;                 // (batch, heads, length, modes)
};

constexpr double QUARTERS = 0.63661977236758134;   // 2 / pi: quarter turns in a radian
constexpr double WHOLE_DOUBLE = 6755399441055744;  // 1.5 * 2^52, as ROUNDER in functions.h

// The nearest whole number of quarter turns, -2 .. 2, and what is left of the phase in radians.
RFA_INLINE void reduce(Doubles quarters, Floats* quarter, Floats* x) {
  const Doubles turns = (quarters * 0.25 + WHOLE_DOUBLE) - WHOLE_DOUBLE, rest = quarters - turns * 4.0;  // [-2, 2]
  *quarter = (narrow(rest) + ROUNDER) - ROUNDER;
  *x = narrow(rest - widen(*quarter)) * 1.57079632679f;
}

RFA_INLINE void cos_sin(Floats quarter, Floats x, Floats* cos, Floats* sin) {
  const Floats z = x * x;
  const Floats s = ((z * -1.9515295891e-4f + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * x + x;
  const Floats c = ((z * 2.443315711809948e-5f - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - z * 0.5f + 1.0f;
  const Floats size = magnitude(quarter);
  const Ints odd = size == 1.0f, half = size > 1.5f;
  *cos = choose(odd, choose(quarter > 0.0f, -s, s), choose(half, -c, c));
  *sin = choose(odd, choose(quarter > 0.0f, c, -c), choose(half, -s, s));
}

// One head of one sample, some rows at a time; short loops as in score.h.
static inline void head_phases(const PhasesProblem& p, int64_t index) {
  constexpr int64_t ROWS_AT_ONCE = 16;
  const int64_t row = p.time_heads > 1 ? index : index / p.heads;
  const double *times = p.times + row * p.length, *given = p.frequency + index % p.heads * p.modes;
  const int64_t padded = round_up(p.modes, LANES), most = ROWS_AT_ONCE * padded;
  Buffer<double> frequency(padded);
  Buffer<float> cosines(most), sines(most);  // first the quarter turns and the rest
  for (int64_t m = 0; m < p.modes; m++) frequency[m] = given[m] * QUARTERS;
  for (int64_t first = 0; first < p.length; first += ROWS_AT_ONCE) {
    const int64_t rows = std::min(ROWS_AT_ONCE, p.length - first);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t m = 0; m < padded; m += LANES) {
        Floats quarter, x;
        reduce(load(frequency + m) * times[first + i], &quarter, &x);
        store(cosines + i * padded + m, quarter);
        store(sines + i * padded + m, x);
      }
    for (int64_t n = 0; n < rows * padded; n += LANES) {
      Floats cos, sin;
      cos_sin(load(cosines + n), load(sines + n), &cos, &sin);
      store(cosines + n, cos);
      store(sines + n, sin);
    }
    for (int64_t i = 0; i < rows; i++) {
      const int64_t at = (index * p.length + first + i) * p.modes;
      std::memcpy(p.cos + at, cosines + i * padded, p.modes * sizeof(float));
      std::memcpy(p.sin + at, sines + i * padded, p.modes * sizeof(float));
    }
  }
}

}  // namespace rfa
