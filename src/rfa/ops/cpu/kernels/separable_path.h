// The separable prior of any times: E, Sigma and the bias of each pair from numbers at its key and its query.
#pragma once
#include <algorithm>
#include <cmath>

#include "decay_range.h"
#include "functions.h"
#include "key_chunks.h"
#include "problem.h"

namespace rfa {

constexpr float LEAST_OF_EXPONENTIAL = 1.9673782e-24f;  // of Sigma + gamma^2, as in dense.least_effective_variance
constexpr float SMALL = 2.3283064e-10f;                 // 2^-32: gradients of variances are summed in this unit

template <bool RICCATI, bool CAUSAL> class SeparablePath {
 public:
  // The numbers of one query: its time, M, u and C (rfa/ops/prior.py), and their gradients.
  struct QueryRow {
    double time, decay_sum, variance, riccati_sum;
    Doubles grad_decay_sum{}, grad_variance{}, grad_riccati_sum{};
    QueryRow(double t, double m, double u, double c) : time(t), decay_sum(m), variance(u), riccati_sum(c) {}
  };

  explicit SeparablePath(const Task& task, bool backward)
      : task_(task),
        padded_(round_up(task.p.keys, KEY_BLOCK)),
        key_(ROWS_OF_PATH * padded_),
        key_bias_(padded_),
        times_(CAUSAL ? 0 : padded_),
        column_sums_(backward ? (ROWS_OF_PATH + 1) * KEY_BLOCK : 0),
        decay_(KEY_BLOCK),
        bias_(KEY_BLOCK),
        weight_(KEY_BLOCK),
        variance_(KEY_BLOCK),
        log_variance_(KEY_BLOCK),
        complement_(KEY_BLOCK),
        inverse_(KEY_BLOCK),
        chunks_(CAUSAL, key_, key_bias_, padded_, task.p.keys) {
    if (!CAUSAL) std::copy_n(task.key_times(), task.p.keys, static_cast<double*>(times_));
    const int64_t b = task.p.path_batch > 1 ? task.b : 0, each = task.p.path_batch * task.p.heads;
    for (int row = 0; row < ROWS_OF_PATH; row++)
      std::copy_n(task.p.key_path + ((row * each) + b * task.p.heads + task.h) * task.p.keys, task.p.keys,
                  key_ + row * padded_);
    if (RICCATI)
      std::copy_n(task.p.key_bias + (b * task.p.heads + task.h) * task.p.keys, task.p.keys,
                  static_cast<float*>(key_bias_));
    query_ = task.p.query_path + (b * task.p.heads + task.h) * task.p.queries;
    query_step_ = each * task.p.queries;
    if (task.p.tail) tail_ = task.p.tail + (b * task.p.heads + task.h) * task.p.keys;
    unit_ = task.p.score_kind == STUDENT_T ? ONE : 1.0f;
    inverse_freedom_ = task.scalar(1) * unit_, key_noise_ = task.scalar(2), floor_ = task.scalar(3);
    query_noise_ = task.scalar(4), bias_factor_ = task.scalar(5);
    chunks_.set_noises(key_noise_, floor_);
    gate_ = task.p.gate;
    least_effective_ = task.p.score_kind == EXPONENTIAL ? LEAST_OF_EXPONENTIAL : LEAST_VARIANCE;
    range_ = DecayRange(key_ + 0, task.p.keys);
  }

  // Whether E <= FAR between n queries and a block of keys, and E w c |q| |k| is below rounding; `reach` = c |q| |k|.
  bool decayed(int64_t first, int64_t n, int64_t start, float reach) const {
    const float divisor = gate_ ? std::max(floor_ + query_noise_, least_effective_) : 1.0f;
    const float widest = inverse_freedom_ / divisor;
    return reach * widest * FAR < 1e-6f * unit_ && range_.far(query_, task_.p.queries, first, n, start);
  }

  QueryRow row(int64_t i) const {
    i = std::min(i, task_.p.queries - 1);
    const double* at = query_ + i;
    return {task_.query_times()[i], at[0], at[query_step_], RICCATI ? at[2 * query_step_] : 0.0};
  }

  // As of `LagTables`.
  float tail(const QueryRow& row, int64_t j) const {
    return static_cast<float>(row.riccati_sum - key_[2 * padded_ + j]) + tail_[j];
  }

  // E, b and w with `n` keys from `start` on. What `add` needs again stays in the buffers below.
  Pairs pairs(const QueryRow& row, int64_t start, int64_t n) {
    const bool whole = CAUSAL && chunks_.prepare(row, start);
    if (whole) {
      chunks_.transport(chunks_.block(), 0, n, decay_, variance_);
      if (RICCATI) chunks_.bias(chunks_.block(), 0, n, bias_);
    }
    for (int64_t j = 0; j < n && !whole; j += LANES) {
      if (CAUSAL && chunks_.reach(row, j)) {
        chunks_.transport(chunks_.at(j), j, j + LANES, decay_, variance_);
        if (RICCATI) chunks_.bias(chunks_.at(j), j, j + LANES, bias_);
        continue;
      }
      const double* key = key_ + start + j;
      const Order order = ordered(row, start + j);
      const Floats apart = narrow(row.decay_sum - load(key)) * order.sign;
      const Floats added = narrow(row.variance - load(key + padded_)) * order.sign;
      Floats decay, less_one;
      exp2_both(smaller(apart * -BITS, all(0.0f)), &decay, &less_one);  // a key that is not seen may lie ahead
      const Floats complement = -less_one * (decay + 1.0f);  // 1 - E^2
      store(decay_ + j, decay);
      store(complement_ + j, complement);
      const Floats variance = added + order.earlier * complement + decay * decay * key_noise_ + floor_;
      store(variance_ + j, larger(variance, all(LEAST_VARIANCE)));
      if (RICCATI) store(bias_ + j, load(key_bias_ + start + j) - magnitude(riccati_between(row, start + j)));
    }
    weigh(n);
    return {decay_, bias_, weight_};
  }

  // From the gradients of E, b and w to those of the path and of the noises. Gradients of variances may be as large as
  // 1 / LEAST_VARIANCE. They and those of M are in units of 1 / SMALL until they are handed over in double.
  void add(QueryRow& row, int64_t start, int64_t n, GradPairs grads) {
    Floats inverse_freedom{}, floor{}, query_noise{};  // of this row and block
    for (int64_t j = 0; j < n; j += LANES) {
      const Order order = ordered(row, start + j);
      const Floats bias = load(grads.bias + j), weight = load(grads.weight + j), inverse = load(inverse_ + j);
      const Floats decay = load(decay_ + j), sigma = load(variance_ + j);
      const Floats relative = weight * load(weight_ + j);  // the gradient of log w, and a finite number
      Floats grad_effective = gate_ ? relative * (inverse * -SMALL) : all(0.0f);
      grad_effective = choose(inverse < 1.0f / least_effective_, grad_effective, all(0.0f));
      Floats variance = grad_effective;
      inverse_freedom += relative;
      if (!RICCATI) {
        bias_factor_sum_ -= widen(bias * load(log_variance_ + j));
        const Floats logarithm = bias * (bias_factor_ * BITS * SMALL) / sigma;
        variance -= choose(sigma > LEAST_VARIANCE, logarithm, all(0.0f));
      }
      floor += variance;
      query_noise += grad_effective;
      // The sums over all pairs are multiplied by times later and must cancel down to the lags. So a pair adds the same
      // numbers at its query and at its key, and u and 1 - E^2 stay in double while E^2 is near 1.
      const Doubles added = widen(variance);
      Doubles remaining;  // by E^2
      if (CAUSAL && chunks_.at(j).behind) {
        remaining = added * chunks_.square(j);
      } else {
        const Floats complement = load(complement_ + j);
        const Doubles apart = (row.decay_sum - load(key_ + start + j)) * widen(order.sign);
        remaining = added * square_of(apart, decay, complement);
      }
      key_noise_sum_ += remaining;
      Doubles grad_decay_sum = -remaining * (2.0 * static_cast<double>(key_noise_) - 2.0 * earlier(row, start + j, order));
      grad_decay_sum -= widen(load(grads.decay + j) * SMALL * decay);
      if (!CAUSAL) grad_decay_sum = grad_decay_sum * widen(order.sign);
      row.grad_decay_sum += grad_decay_sum;
      add_to(column_sums_ + j, -grad_decay_sum);
      if (CAUSAL) {
        row.grad_variance += added;
        add_to(column_sums_ + KEY_BLOCK + j, -remaining);
      } else {
        const Doubles later = widen(order.sign) * 0.5 + 0.5;  // 1 where the query is the later one
        row.grad_variance += added * later - remaining * (1.0 - later);
        add_to(column_sums_ + KEY_BLOCK + j, added * (1.0 - later) - remaining * later);
      }
      if (RICCATI) {
        const Doubles grad_bias = widen(bias);
        add_to(column_sums_ + 3 * KEY_BLOCK + j, grad_bias);
        if (CAUSAL) {  // C_i <= C_j: the same at the key, but for its sign
          row.grad_riccati_sum += grad_bias;
        } else {
          const Doubles grad_riccati_sum = widen(choose(riccati_between(row, start + j) < 0.0f, -bias, bias));
          row.grad_riccati_sum -= grad_riccati_sum;
          add_to(column_sums_ + 2 * KEY_BLOCK + j, grad_riccati_sum);
        }
      }
    }
    inverse_freedom_sum_ += widen(inverse_freedom);
    floor_sum_ += widen(floor);
    query_noise_sum_ += widen(query_noise);
  }

  void end_row(int64_t i, const QueryRow& row) {
    if (i >= task_.p.queries) return;
    const Problem& p = task_.p;
    const int64_t each = p.batch * p.heads * p.queries;
    double* to = p.grad_query_path + task_.slice * p.path_rows * each + task_.row_index() * p.queries + i;
    to[0] += sum(row.grad_decay_sum) / SMALL;
    to[each] += sum(row.grad_variance) / SMALL;
    if (RICCATI) to[2 * each] += sum(row.grad_riccati_sum);
  }

  void begin_block(int64_t) {
    std::fill_n(static_cast<double*>(column_sums_), (ROWS_OF_PATH + 1) * KEY_BLOCK, 0.0);
  }

  void end_block(int64_t start, int64_t n) {
    const Problem& p = task_.p;
    for (int row = 0; row < ROWS_OF_PATH; row++) {
      const bool as_bias = CAUSAL && row == 2;
      const double unit = row < 2 ? 1.0 / SMALL : as_bias ? -1.0 : 1.0;
      const double* from = column_sums_ + (as_bias ? 3 : row) * KEY_BLOCK;
      double* to = p.grad_key_path + (row * p.batch * p.heads + task_.row_index()) * p.keys + start;
      for (int64_t j = 0; j < n; j++) to[j] = unit * from[j];
    }
    if (RICCATI)
      std::copy_n(column_sums_ + 3 * KEY_BLOCK, n, p.grad_key_bias + task_.row_index() * p.keys + start);
  }

  void finish(double* scalars) {
    const double inverse_freedom = task_.scalar(1);
    scalars[1] = inverse_freedom > 0.0 ? sum(inverse_freedom_sum_) / inverse_freedom : 0.0;
    scalars[2] = sum(key_noise_sum_) / SMALL, scalars[3] = sum(floor_sum_) / SMALL;
    scalars[4] = sum(query_noise_sum_) / SMALL, scalars[5] = sum(bias_factor_sum_);
  }

 private:
  static constexpr int ROWS_OF_PATH = RICCATI ? 3 : 2;
  struct Order {
    Floats sign, earlier;  // +1 where the key is the earlier one; u of that one
  };

  RFA_INLINE_MEMBER Order ordered(const QueryRow& row, int64_t j) const {
    const Floats key = narrow(load(key_ + padded_ + j));
    if (CAUSAL) return {all(1.0f), key};
    const Ints later = narrow(row.time - load(times_ + j)) < 0.0f;
    return {choose(later, all(-1.0f), all(1.0f)), choose(later, all(static_cast<float>(row.variance)), key)};
  }

  // w, and without a Riccati prior b, from Sigma. Pointers are copied: a store might change members.
  void weigh(int64_t n) {
    const float query_noise = query_noise_, least = least_effective_, freedom = inverse_freedom_, factor = bias_factor_;
    const bool gate = gate_;
    const float* variances = variance_;
    float *inverses = inverse_, *weights = weight_, *logs = log_variance_, *biases = bias_;
    for (int64_t j = 0; j < n; j += LANES) {
      const Floats effective_variance = larger(load(variances + j) + query_noise, all(least));
      const Floats inverse = gate ? 1.0f / effective_variance : all(1.0f);
      store(inverses + j, inverse);
      store(weights + j, inverse * freedom);
      if (RICCATI) continue;
      const Floats log_variance = log2(load(variances + j));
      Floats bias = log_variance * -factor;
      rounded(bias);
      store(logs + j, log_variance);
      store(biases + j, bias);
    }
  }

  // u of the earlier one, as `order.earlier` but in double.
  RFA_INLINE_MEMBER Doubles earlier(const QueryRow& row, int64_t j, const Order& order) const {
    const Doubles key = load(key_ + padded_ + j);
    if (CAUSAL) return key;
    const Doubles later = widen(order.sign) * 0.5 + 0.5;
    return key * later + row.variance * (1.0 - later);
  }

  // C_i - C_j
  RFA_INLINE_MEMBER Floats riccati_between(const QueryRow& row, int64_t j) const {
    return narrow(row.riccati_sum - load(key_ + 2 * padded_ + j));
  }

  const Task& task_;
  int64_t padded_, query_step_;
  Buffer<double> key_;
  Buffer<float> key_bias_;
  Buffer<double> times_;         // only where keys may lie ahead
  Buffer<double> column_sums_;  // of one block of keys: gradients of M, u, then C and the bias
  // One query with a block of keys: E, b, w, Sigma, log2 Sigma, 1 - E^2, 1 / (Sigma + gamma^2).
  Buffer<float> decay_, bias_, weight_, variance_, log_variance_, complement_, inverse_;
  KeyChunks<RICCATI> chunks_;
  const double* query_;
  const float* tail_ = nullptr;
  float unit_, inverse_freedom_, key_noise_, floor_, query_noise_, bias_factor_, least_effective_;
  bool gate_;
  DecayRange range_{nullptr, 0};
  Doubles inverse_freedom_sum_{}, key_noise_sum_{}, floor_sum_{}, query_noise_sum_{}, bias_factor_sum_{};
};

}  // namespace rfa
