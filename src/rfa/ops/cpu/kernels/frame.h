// Rows of states into the common frame and back: exp(-i w t) x, real parts first; blank where a key takes no part.
#pragma once
#include <vector>

#include "number.h"
#include "problem.h"

namespace rfa {

// y = x turned by the phases, backwards for `sign` = -1; `cos` null leaves it as it is. `n` channels.
RFA_INLINE void turn(const float* x, const float* cos, const float* sin, float sign, float* y, int64_t n) {
  if (!cos) {
    std::memcpy(y, x, n * sizeof(float));
    return;
  }
  const int64_t modes = n / 2;
  int64_t m = 0;
  for (; m + REGISTER <= modes; m += REGISTER) {
    const auto at = [m](const float* p) { return load_register<FloatRegister>(p + m); };
    const FloatRegister c = at(cos), s = at(sin) * sign, re = at(x), im = at(x + modes);
    store_register(y + m, c * re - s * im);
    store_register(y + modes + m, s * re + c * im);
  }
  for (; m < modes; m++) {
    const float c = cos[m], s = sin[m] * sign, re = x[m], im = x[modes + m];
    y[m] = c * re - s * im;
    y[modes + m] = s * re + c * im;
  }
}

// Phases of one task's rows, or none where the states are in the frame already.
struct Turn {
  const float *cos = nullptr, *sin = nullptr;
  int64_t row = 0;
  Turn() = default;
  Turn(const Task& task, const Phases& c, const Phases& s, bool turned)
      : cos(turned ? c.at(task.b, task.h) : nullptr), sin(turned ? s.at(task.b, task.h) : nullptr), row(c.row) {}
  const float* c(int64_t t) const { return cos ? cos + t * row : nullptr; }
  const float* s(int64_t t) const { return cos ? sin + t * row : nullptr; }
};

struct Turns {
  Turn key, query, value, out;
  explicit Turns(const Task& task)
      : key(task, task.p.key_cos, task.p.key_sin, task.p.turned),
        query(task, task.p.query_cos, task.p.query_sin, task.p.turned),
        value(task, task.p.key_cos, task.p.key_sin, task.p.turned && task.p.rotate_values),
        out(task, task.p.query_cos, task.p.query_sin, task.p.turned && task.p.rotate_values) {}
};

// Whether all `padded` entries of a row are numbers.
static inline bool finite(const float* row, int64_t padded) {
  Floats total{};
  for (int64_t c = 0; c < padded; c += LANES) total += load(row + c) * 0.0f;
  return sum(total) == 0.0f;
}

// Rows [first, first + n) into `rows` (row-major, `padded` floats a row; what is beyond `channels` stays zero). Rows that
// hold NaN or infinity become zeros, because a weight of zero times NaN is NaN, and join `nonfinite`.
__attribute__((noinline)) static void pack_rows(const States& states, const Task& task, const Turn& turn_by, int64_t first, int64_t n,
                             int64_t channels, int64_t padded, bool is_key, float* rows, std::vector<int64_t>* nonfinite) {
  for (int64_t i = 0; i < n; i++) {
    const int64_t t = first + i;
    float* row = rows + i * padded;
    const bool present = !is_key || task.group_of_key(t) >= 0;
    if (present) {
      turn(states.at(task.b, task.h, t), turn_by.c(t), turn_by.s(t), -1.0f, row, channels);
      bool numbers = finite(row, padded);
      if (numbers && task.p.brgemm) {  // so norms are those of the factors
        round_to_bfloat16(row, padded);
        numbers = finite(row, padded);
      }
      if (numbers) continue;
      nonfinite->push_back(t);
    }
    std::memset(row, 0, padded * sizeof(float));
  }
}

// `n` rows as panels: for each COLUMNS rows, channel by channel. Missing rows are zeros.
__attribute__((noinline)) static void pack_panels(const float* rows, int64_t n, int64_t padded, float* panels) {
  for (int64_t j = 0; j < n; j += COLUMNS, panels += COLUMNS * padded) {
    const int64_t width = n - j < COLUMNS ? n - j : COLUMNS;
    for (int64_t c = 0; c < padded; c++) {
      for (int64_t i = 0; i < width; i++) panels[c * COLUMNS + i] = rows[(j + i) * padded + c];
      for (int64_t i = width; i < COLUMNS; i++) panels[c * COLUMNS + i] = 0.0f;
    }
  }
}

static inline float squared_norm(const float* row, int64_t padded) {
  Floats total{};
  for (int64_t c = 0; c < padded; c += LANES) total += load(row + c) * load(row + c);
  return sum(total);
}

}  // namespace rfa
