// The prior of dot products at any times: the decay E and the bias of each pair from numbers at its key and its query.
#pragma once
#include <algorithm>

#include "decay_range.h"
#include "functions.h"
#include "problem.h"

namespace rfa {

// What `SeparablePath` is for filters. There are no variances, so u and w stay zero, and E is 1 where nothing decays.
template <bool CAUSAL> class ProductPath {
 public:
  // The numbers of one query: its time, M and C (rfa/ops/prior.py), and their gradients.
  struct QueryRow {
    double time, decay_sum, bias_sum;
    Doubles grad_decay_sum{}, grad_bias_sum{};
    QueryRow(double t, double m, double c) : time(t), decay_sum(m), bias_sum(c) {}
  };

  explicit ProductPath(const Task& task, bool backward)
      : task_(task),
        padded_(round_up(task.p.keys, KEY_BLOCK)),
        decay_sums_(padded_),
        bias_sums_(padded_),
        key_bias_(padded_),
        times_(CAUSAL ? 0 : padded_),
        column_sums_(backward ? 3 * KEY_BLOCK : 0),
        decay_(KEY_BLOCK),
        bias_(KEY_BLOCK),
        weight_(KEY_BLOCK) {
    const Problem& p = task.p;
    const int64_t b = p.path_batch > 1 ? task.b : 0, each = p.path_batch * p.heads, row = b * p.heads + task.h;
    std::copy_n(p.key_path + row * p.keys, p.keys, static_cast<double*>(decay_sums_));
    std::copy_n(p.key_path + (2 * each + row) * p.keys, p.keys, static_cast<double*>(bias_sums_));
    std::copy_n(p.key_bias + row * p.keys, p.keys, static_cast<float*>(key_bias_));
    if (!CAUSAL) std::copy_n(task.key_times(), p.keys, static_cast<double*>(times_));
    query_decay_sums_ = p.query_path + row * p.queries;
    query_bias_sums_ = p.query_path + (2 * each + row) * p.queries;
    if (p.tail) tail_ = p.tail + row * p.keys;
    const auto first = query_decay_sums_[0];
    const auto differs = [first](double m) { return m != first; };
    decays_ = std::any_of(query_decay_sums_, query_decay_sums_ + p.queries, differs) ||
              std::any_of(decay_sums_ + 0, decay_sums_ + p.keys, differs);
    std::fill_n(static_cast<float*>(decay_), KEY_BLOCK, 1.0f);
    std::fill_n(static_cast<float*>(weight_), KEY_BLOCK, 0.0f);
    range_ = DecayRange(decay_sums_ + 0, p.keys);
  }

  // Whether E <= FAR between n queries and a block of keys.
  bool decayed(int64_t first, int64_t n, int64_t start, float) const {
    return decays_ && range_.far(query_decay_sums_, task_.p.queries, first, n, start);
  }

  QueryRow row(int64_t i) const {
    i = std::min(i, task_.p.queries - 1);
    return {task_.query_times()[i], query_decay_sums_[i], query_bias_sums_[i]};
  }

  // As of `LagTables`.
  float tail(const QueryRow& row, int64_t j) const { return tail_[j] - static_cast<float>(row.bias_sum - bias_sums_[j]); }

  // E, b and w with `n` keys from `start` on.
  Pairs pairs(const QueryRow& row, int64_t start, int64_t n) {
    if (decays_)
      for (int64_t j = 0; j < n; j += LANES) {
        Floats decay, less_one;
        const Floats apart = narrow(row.decay_sum - load(decay_sums_ + start + j));
        // a key that is not seen may lie ahead
        exp2_both(smaller((CAUSAL ? apart : magnitude(apart)) * -BITS, all(0.0f)), &decay, &less_one);
        store(decay_ + j, decay);
      }
    for (int64_t j = 0; j < n; j += LANES)
      store(bias_ + j, load(key_bias_ + start + j) - magnitude(between(row, start + j)));
    return {decay_, bias_, weight_};
  }

  // From the gradients of E and b to those of the path. A pair adds the same numbers, in double, at its query and at its
  // key: the sums over all pairs are multiplied by times later and must cancel down to the lags.
  void add(QueryRow& row, int64_t start, int64_t n, GradPairs grads) {
    for (int64_t j = 0; j < n; j += LANES) {
      const Floats bias = load(grads.bias + j);
      const Doubles grad_bias = widen(bias);
      add_to(column_sums_ + 2 * KEY_BLOCK + j, grad_bias);
      if (CAUSAL) {  // C_i >= C_j: the same at the key
        row.grad_bias_sum -= grad_bias;
      } else {
        const Doubles grad_bias_sum = widen(choose(ahead(row, start + j), -bias, bias));
        row.grad_bias_sum -= grad_bias_sum;
        add_to(column_sums_ + KEY_BLOCK + j, grad_bias_sum);
      }
    }
    for (int64_t j = 0; j < n; j += LANES) {
      Floats decay = load(grads.decay + j) * load(decay_ + j);
      if (!CAUSAL) decay = choose(ahead(row, start + j), -decay, decay);
      const Doubles grad_decay_sum = widen(decay);
      row.grad_decay_sum -= grad_decay_sum;
      add_to(column_sums_ + j, grad_decay_sum);
    }
  }

  void end_row(int64_t i, const QueryRow& row) {
    if (i >= task_.p.queries) return;
    const Problem& p = task_.p;
    const int64_t each = p.batch * p.heads * p.queries;
    double* to = p.grad_query_path + task_.slice * p.path_rows * each + task_.row_index() * p.queries + i;
    to[0] += sum(row.grad_decay_sum);
    to[2 * each] += sum(row.grad_bias_sum);
  }

  void begin_block(int64_t) { std::fill_n(static_cast<double*>(column_sums_), 3 * KEY_BLOCK, 0.0); }

  void end_block(int64_t start, int64_t n) {
    const Problem& p = task_.p;
    const int64_t each = p.batch * p.heads * p.keys, at = task_.row_index() * p.keys + start;
    std::copy_n(column_sums_ + 0, n, p.grad_key_path + at);
    std::fill_n(p.grad_key_path + each + at, n, 0.0);
    std::copy_n(column_sums_ + (CAUSAL ? 2 : 1) * KEY_BLOCK, n, p.grad_key_path + 2 * each + at);
    std::copy_n(column_sums_ + 2 * KEY_BLOCK, n, p.grad_key_bias + at);
  }

  void finish(double* scalars) { std::fill_n(scalars + 1, 5, 0.0); }

 private:
  // Where keys are the later ones. Where nothing decays M does not tell.
  RFA_INLINE_MEMBER Ints ahead(const QueryRow& row, int64_t j) const {
    return narrow(row.time - load(times_ + j)) < 0.0f;
  }

  // C_i - C_j
  RFA_INLINE_MEMBER Floats between(const QueryRow& row, int64_t j) const {
    return narrow(row.bias_sum - load(bias_sums_ + j));
  }

  const Task& task_;
  int64_t padded_;
  Buffer<double> decay_sums_, bias_sums_;
  Buffer<float> key_bias_;
  Buffer<double> times_;  // only where keys may lie ahead
  Buffer<double> column_sums_;  // of one block of keys: gradients of M, C and the bias
  Buffer<float> decay_, bias_, weight_;  // one query with a block of keys
  const double *query_decay_sums_, *query_bias_sums_;
  const float* tail_ = nullptr;
  bool decays_;
  DecayRange range_{nullptr, 0};
};

}  // namespace rfa
