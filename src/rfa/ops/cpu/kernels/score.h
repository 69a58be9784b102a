// From dot products to weights, and back: the formulas of rfa/ops/kernel.py on one row of a tile.
#pragma once
#include <cmath>

#include "functions.h"
#include "visibility.h"

namespace rfa {

// The numbers of one query row: |q|^2, the coefficient c, and what is subtracted from its scores, in two parts.
struct RowOfScores {
  float norm, coefficient, offset, rest;
};

// A row is sharp where one weight may be larger than this: backward then forms its `<grad_out, out>` again, see
// `Backward::sharpen`. Forward marks such rows in the last bit of their log2 sum, a relative change of 2^-52. Beyond
// MOST_MARKED that bit is lost to rounding: weights are 0 or equal there, and every row counts as sharp.
constexpr float SHARP = 0.75f, MOST_MARKED = 67108864.0f;  // 2^26
static inline double marked(double log_sum, bool sharp) {
  if (!(std::fabs(log_sum) <= MOST_MARKED)) return log_sum;
  int64_t bits;
  std::memcpy(&bits, &log_sum, sizeof bits);
  bits = (bits & ~int64_t{1}) | sharp;
  std::memcpy(&log_sum, &bits, sizeof bits);
  return log_sum;
}
static inline bool is_marked(double log_sum) {
  int64_t bits;
  std::memcpy(&bits, &log_sum, sizeof bits);
  return std::isfinite(log_sum) && (std::fabs(log_sum) > MOST_MARKED || (bits & 1));
}

struct Distance {
  Floats half, residual, weighted;  // t = E |k|^2 - 2 q.k, r, and w r
};

RFA_INLINE Distance distance(Floats decay, Floats weight, Floats dot, Floats key_norm, RowOfScores row) {
  Distance d;
  Floats prior = decay * key_norm;
  rounded(prior);
  d.half = prior - 2.0f * dot;
  d.residual = larger(decay * d.half + row.norm, all(0.0f));
  d.weighted = d.residual * weight;
  rounded(d.weighted);
  return d;
}

struct Scored {
  Floats z, log;  // in bits; what the coefficient multiplies: log2(1 + w r), w r or q.k
};

// `x`: w r, of Student-t scores in units of UNIT, or the dot product.
template <int64_t SCORE> RFA_INLINE Scored score(Floats bias, Floats x, RowOfScores row) {
  if (SCORE == DOT_PRODUCT) return {bias + row.coefficient * x, x};
  const Floats log = SCORE == STUDENT_T ? log2_1p(x) : x;
  return {bias - row.coefficient * log, log};
}

// The functions below go over a row several times, not once. One pass would be a chain of some 110 cycles, and a
// processor looks ahead over a few hundred instructions: it overlaps more short chains than long ones.

// Dot products of one row become z. `n` keys, a multiple of LANES.
template <int64_t SCORE>
RFA_INLINE void score_row(Pairs pairs, RowOfScores row, int64_t n, const float* key_norms, float* tile) {
  if (SCORE != DOT_PRODUCT)
    for (int64_t j = 0; j < n; j += LANES)
      store(tile + j, distance(load(pairs.decay + j), load(pairs.weight + j), load(tile + j), load(key_norms + j), row).weighted);
  for (int64_t j = 0; j < n; j += LANES) store(tile + j, score<SCORE>(load(pairs.bias + j), load(tile + j), row).z);
}

// Dot products of one row become `2^(z - offset) E`; returns the LANES parts of `sum 2^(z - offset)`. `mask` covers the
// keys that are not clear.
template <int64_t SCORE>
RFA_INLINE Floats weigh(Pairs pairs, RowOfScores row, VisibleKeys seen, const float* key_norms, const int32_t* mask,
                        float* tile) {
  score_row<SCORE>(pairs, row, seen.keys, key_norms, tile);
  [[maybe_unused]] const FlushDenormals flush;
  Floats total = all(0.0f);
  int64_t j = 0;
  for (; j < seen.clear; j += LANES) {
    const Floats weight = exp2(load(tile + j) - row.offset);
    total += weight;
    store(tile + j, weight * load(pairs.decay + j));
  }
  for (; j < seen.keys; j += LANES) {
    const Floats weight = keep(exp2(load(tile + j) - row.offset), load(mask + j));
    total += weight;
    store(tile + j, weight * load(pairs.decay + j));
  }
  return total;
}

// The largest score of one row.
template <int64_t SCORE>
RFA_INLINE float highest(Pairs pairs, RowOfScores row, VisibleKeys seen, const float* key_norms, const int32_t* mask,
                         float* tile) {
  score_row<SCORE>(pairs, row, seen.keys, key_norms, tile);
  Floats most = all(-INFINITY);
  for (int64_t j = 0; j < seen.keys; j += LANES) {
    const Floats z = load(tile + j);
    most = larger(j < seen.clear ? z : choose(load(mask + j), z, all(-INFINITY)), most);
  }
  return largest(most);
}

// For one row: what the coefficient multiplies, and the exponents of the weights.
template <int64_t SCORE>
RFA_INLINE void exponents(Pairs pairs, RowOfScores row, int64_t n, const float* key_norms, const float* dots, float* logs,
                          float* weights) {
  for (int64_t j = 0; j < n; j += LANES)
    store(logs + j, SCORE == DOT_PRODUCT ? load(dots + j)
                                         : distance(load(pairs.decay + j), load(pairs.weight + j), load(dots + j),
                                                    load(key_norms + j), row).weighted);
  for (int64_t j = 0; j < n; j += LANES) {
    const Scored s = score<SCORE>(load(pairs.bias + j), load(logs + j), row);
    store(logs + j, s.log);
    store(weights + j, (s.z - row.offset) - row.rest);
  }
}

// Adds the weights of one row, and with them ln2 E <grad_out, v>.
template <int64_t SCORE>
RFA_INLINE void add_mean(Pairs pairs, RowOfScores row, VisibleKeys seen, const float* key_norms, const int32_t* mask,
                         const float* dots, const float* values, double* total, double* inner) {
  alignas(64) float logs[KEY_BLOCK], weights[KEY_BLOCK];
  exponents<SCORE>(pairs, row, seen.keys, key_norms, dots, logs, weights);
  Doubles all_weights{}, all_values{};
  for (int64_t j = 0; j < seen.keys; j += LANES) {
    Floats weight = exp2(load(weights + j));
    if (j >= seen.clear) weight = keep(weight, load(mask + j));
    all_weights += widen(weight);
    all_values += widen(weight) * (widen(load(pairs.decay + j)) * widen(load(values + j)));
  }
  *total += sum(all_weights);
  *inner += sum(all_values);
}

// ln2 <grad_out, out>; `rest` is the gradient of the row's log2 sum, less what rounding took from `part`.
struct Mean {
  float part, rest;
};

// Gradients of one row. In: q.k in `dots`, ln2 <grad_out, v> in `values`. Out: the coefficient of k and q in
// `dots`, A E in `values`, and the gradients of `pairs`.
template <int64_t SCORE>
RFA_INLINE void row_gradients(Pairs pairs, RowOfScores row, Mean mean, VisibleKeys seen, const float* key_norms,
                      const int32_t* mask, float* dots, float* values, GradPairs grads, float* grad_key_norms, float* grad_norm,
                      double* grad_coefficient) {
  const int64_t n = seen.keys;
  alignas(64) float logs[KEY_BLOCK], weights[KEY_BLOCK];
  exponents<SCORE>(pairs, row, n, key_norms, dots, logs, weights);
  Floats norm{}, coefficient{};
  {
    [[maybe_unused]] const FlushDenormals flush;
    for (int64_t j = 0; j < n; j += LANES) {
      Floats weight = exp2(load(weights + j));
      if (j >= seen.clear) weight = keep(weight, load(mask + j));
      const Floats value = load(values + j), decay = load(pairs.decay + j);
      Floats apart = decay * value - mean.part;
      if (mean.rest != 0.0f) apart += all(mean.rest);
      const Floats z = weight * apart;
      coefficient += z * load(logs + j);
      store(values + j, weight * decay);
      store(grads.bias + j, z);
      store(grads.decay + j, weight * value * BITS);
    }
  }
  if (SCORE == DOT_PRODUCT) {
    for (int64_t j = 0; j < n; j += LANES) {
      store(dots + j, load(grads.bias + j) * row.coefficient);
      store(grads.weight + j, all(0.0f));
    }
    *grad_coefficient += sum(coefficient);
    return;
  }
  // Where r is 0, q - E k consists of rounding alone. For a query of zeros r is E^2 |k|^2, which may have underflown.
  const Floats zero = all(row.norm > 0.0f ? 0.0f : -1.0f);
  for (int64_t j = 0; j < n; j += LANES) {
    const Floats decay = load(pairs.decay + j), key_norm = load(key_norms + j), weight = load(pairs.weight + j);
    const Distance d = distance(decay, weight, load(dots + j), key_norm, row);
    Floats x = load(grads.bias + j);  // becomes the gradient of w r
    x = SCORE == STUDENT_T ? x * (-row.coefficient * BITS) / (d.weighted + ONE) : x * -row.coefficient;
    const Floats residual = keep(x * weight, d.residual > zero);
    const Floats slope = residual * decay * -2.0f;
    norm += residual;
    store(grads.weight + j, x * d.residual);
    store(grads.decay + j, load(grads.decay + j) + residual * (d.half + decay * key_norm));
    add_to(grad_key_norms + j, slope * decay * -0.5f);
    store(dots + j, slope);
  }
  *grad_norm += sum(norm);
  *grad_coefficient -= sum(coefficient);
}

}  // namespace rfa
