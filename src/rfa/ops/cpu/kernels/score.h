// From dot products to weights, and back: the formulas of rfa/ops/fused.py on one row of a tile.
#pragma once
#include "functions.h"
#include "problem.h"

namespace rfa {

// What a row knows: |q|^2, the coefficient c, and what is subtracted from its scores, in two parts.
struct RowOfScores {
  float norm, coefficient, offset, rest;
};

struct Scored {
  Floats z;                    // in bits
  Floats residual, half;       // r, and t = E |k|^2 - 2 q.k
  Floats one_plus, log;        // 1 + w r and its log2
};

template <int64_t SCORE, class Pair>
RFA_INLINE Scored score(const Pair& p, Floats dot, Floats key_norm, RowOfScores row) {
  Scored s;
  if (SCORE == DOT_PRODUCT) {
    s.z = p.bias + row.coefficient * dot;
    return s;
  }
  Floats prior = p.decay * key_norm;
  rounded(prior);
  s.half = prior - 2.0f * dot;
  s.residual = larger(p.decay * s.half + row.norm, all(0.0f));
  Floats x = s.residual * p.weight;
  rounded(x);
  if (SCORE == STUDENT_T) {
    s.one_plus = x + 1.0f;
    s.log = log2_1p(x, s.one_plus);
    s.z = p.bias - row.coefficient * s.log;
  } else {
    s.z = p.bias - row.coefficient * x;
  }
  return s;
}

// Dot products of one row become `2^(z - offset) E`; returns `sum 2^(z - offset)`. `mask` null: all are seen.
template <int64_t SCORE, class Prior>
RFA_INLINE float weigh(const Prior& prior, const typename Prior::Row& place, RowOfScores row, int64_t start, int64_t n,
                       const float* key_norms, const int32_t* mask, float* tile) {
  Floats total = all(0.0f), other = total;
  int64_t j = 0;
  for (; j + 2 * LANES <= n; j += 2 * LANES) {  // two at a time overlap better
    const int64_t k = j + LANES;
    const auto pair = prior.at(place, start + j), next = prior.at(place, start + k);
    Floats weight = exp2(score<SCORE>(pair, load(tile + j), load(key_norms + j), row).z - row.offset);
    Floats following = exp2(score<SCORE>(next, load(tile + k), load(key_norms + k), row).z - row.offset);
    if (mask) weight = keep(weight, load(mask + j)), following = keep(following, load(mask + k));
    total += weight, other += following;
    store(tile + j, weight * pair.decay);
    store(tile + k, following * next.decay);
  }
  for (; j < n; j += LANES) {
    const auto pair = prior.at(place, start + j);
    Floats weight = exp2(score<SCORE>(pair, load(tile + j), load(key_norms + j), row).z - row.offset);
    if (mask) weight = keep(weight, load(mask + j));
    total += weight;
    store(tile + j, weight * pair.decay);
  }
  return sum(total + other);
}

// The largest score of one row.
template <int64_t SCORE, class Prior>
RFA_INLINE float highest(const Prior& prior, const typename Prior::Row& place, RowOfScores row, int64_t start,
                         int64_t n, const float* key_norms, const int32_t* mask, const float* tile) {
  Floats most = all(-INFINITY);
  for (int64_t j = 0; j < n; j += LANES) {
    const Scored s = score<SCORE>(prior.at(place, start + j), load(tile + j), load(key_norms + j), row);
    const Floats z = mask ? choose(load(mask + j), s.z, all(-INFINITY)) : s.z;
    most = larger(z, most);
  }
  return largest(most);
}

// Gradients of one row. In: q.k in `dots`, ln2 <grad_out, v> in `values`. Out: the coefficient of k and q in
// `dots`, A E in `values`. `mean` is ln2 <grad_out, out> minus the gradient of the row's log2 sum.
template <int64_t SCORE, class Prior>
RFA_INLINE void judge(Prior& prior, typename Prior::Row& place, RowOfScores row, float mean, int64_t start,
                      int64_t n, const float* key_norms, const int32_t* mask, float* dots, float* values,
                      float* grad_key_norms, float* grad_norm, double* grad_coefficient) {
  Floats norm{}, coefficient{};
  for (int64_t j = 0; j < n; j += LANES) {
    const auto pair = prior.at(place, start + j);
    const Floats dot = load(dots + j), key_norm = load(key_norms + j), value = load(values + j);
    const Scored s = score<SCORE>(pair, dot, key_norm, row);
    Floats weight = exp2((s.z - row.offset) - row.rest);
    if (mask) weight = keep(weight, load(mask + j));
    const Floats z = weight * (pair.decay * value - mean);
    Floats decay = weight * value * BITS, slope, grad_weight{};
    store(values + j, weight * pair.decay);
    if (SCORE == DOT_PRODUCT) {
      coefficient += z * dot;
      slope = z * row.coefficient;
    } else {
      Floats x;  // the gradient of w r
      if (SCORE == STUDENT_T) {
        coefficient -= z * s.log;
        x = z * (-row.coefficient * BITS) / s.one_plus;
      } else {
        coefficient -= z * pair.weight * s.residual;
        x = z * -row.coefficient;
      }
      grad_weight = x * s.residual;
      const Floats residual = x * pair.weight;
      decay += residual * (s.half + pair.decay * key_norm);
      slope = residual * pair.decay * -2.0f;
      norm += residual;
      add_to(grad_key_norms + j, slope * pair.decay * -0.5f);
    }
    store(dots + j, slope);
    prior.add(place, start + j, pair, decay, z, grad_weight);
  }
  *grad_norm += sum(norm);
  *grad_coefficient += sum(coefficient);
}

}  // namespace rfa
