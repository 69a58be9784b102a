// From dot products to weights, and back: the formulas of rfa/ops/fused.py on one row of a tile.
#pragma once
#include "functions.h"
#include "visibility.h"

namespace rfa {

// What a row knows: |q|^2, the coefficient c, and what is subtracted from its scores, in two parts.
struct RowOfScores {
  float norm, coefficient, offset, rest;
};

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

// `x`: w r, or the dot product.
template <int64_t SCORE> RFA_INLINE Scored score(Floats bias, Floats x, RowOfScores row) {
  if (SCORE == DOT_PRODUCT) return {bias + row.coefficient * x, x};
  const Floats log = SCORE == STUDENT_T ? log2_1p(x, x + 1.0f) : x;
  return {bias - row.coefficient * log, log};
}

// What follows goes over a row several times, not once: the whole chain of operations is some 110 cycles long, and a
// processor looks ahead over a few hundred instructions. Of short chains more are in flight.

// Dot products of one row become z. `n` keys, a multiple of LANES.
template <int64_t SCORE>
RFA_INLINE void score_row(Pairs pairs, RowOfScores row, int64_t n, const float* key_norms, float* tile) {
  if (SCORE != DOT_PRODUCT)
    for (int64_t j = 0; j < n; j += LANES)
      store(tile + j, distance(load(pairs.decay + j), load(pairs.weight + j), load(tile + j), load(key_norms + j), row).weighted);
  for (int64_t j = 0; j < n; j += LANES) store(tile + j, score<SCORE>(load(pairs.bias + j), load(tile + j), row).z);
}

// Dot products of one row become `2^(z - offset) E`; returns the LANES parts of `sum 2^(z - offset)`. `mask`: of what is not
// clear.
template <int64_t SCORE>
RFA_INLINE Floats weigh(Pairs pairs, RowOfScores row, Sight seen, const float* key_norms, const int32_t* mask,
                        float* tile) {
  score_row<SCORE>(pairs, row, seen.keys, key_norms, tile);
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
RFA_INLINE float highest(Pairs pairs, RowOfScores row, Sight seen, const float* key_norms, const int32_t* mask,
                         float* tile) {
  score_row<SCORE>(pairs, row, seen.keys, key_norms, tile);
  Floats most = all(-INFINITY);
  for (int64_t j = 0; j < seen.keys; j += LANES) {
    const Floats z = load(tile + j);
    most = larger(j < seen.clear ? z : choose(load(mask + j), z, all(-INFINITY)), most);
  }
  return largest(most);
}

// Gradients of one row. In: q.k in `dots`, ln2 <grad_out, v> in `values`. Out: the coefficient of k and q in
// `dots`, A E in `values`, and the gradients of `pairs`. `mean` is ln2 <grad_out, out> minus the gradient of the row's
// log2 sum.
template <int64_t SCORE>
RFA_INLINE void judge(Pairs pairs, RowOfScores row, float mean, Sight seen, const float* key_norms,
                      const int32_t* mask, float* dots, float* values, GradPairs grads, float* grad_key_norms, float* grad_norm,
                      double* grad_coefficient) {
  const int64_t n = seen.keys;
  alignas(64) float logs[KEY_BLOCK], weights[KEY_BLOCK];
  for (int64_t j = 0; j < n; j += LANES)
    store(logs + j, SCORE == DOT_PRODUCT ? load(dots + j)
                                         : distance(load(pairs.decay + j), load(pairs.weight + j), load(dots + j),
                                                    load(key_norms + j), row).weighted);
  for (int64_t j = 0; j < n; j += LANES) {
    const Scored s = score<SCORE>(load(pairs.bias + j), load(logs + j), row);
    store(logs + j, s.log);
    store(weights + j, (s.z - row.offset) - row.rest);
  }
  Floats norm{}, coefficient{};
  for (int64_t j = 0; j < n; j += LANES) {
    Floats weight = exp2(load(weights + j));
    if (j >= seen.clear) weight = keep(weight, load(mask + j));
    const Floats value = load(values + j), decay = load(pairs.decay + j);
    const Floats z = weight * (decay * value - mean);
    coefficient += z * load(logs + j);
    store(values + j, weight * decay);
    store(grads.bias + j, z);
    store(grads.decay + j, weight * value * BITS);
  }
  if (SCORE == DOT_PRODUCT) {
    for (int64_t j = 0; j < n; j += LANES) {
      store(dots + j, load(grads.bias + j) * row.coefficient);
      store(grads.weight + j, all(0.0f));
    }
    *grad_coefficient += sum(coefficient);
    return;
  }
  for (int64_t j = 0; j < n; j += LANES) {
    const Floats decay = load(pairs.decay + j), key_norm = load(key_norms + j), weight = load(pairs.weight + j);
    const Distance d = distance(decay, weight, load(dots + j), key_norm, row);
    Floats x = load(grads.bias + j);  // becomes the gradient of w r
    x = SCORE == STUDENT_T ? x * (-row.coefficient * BITS) / (d.weighted + 1.0f) : x * -row.coefficient;
    const Floats residual = x * weight, slope = residual * decay * -2.0f;
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
