// The prior of uniform times: E, b and w from tables over the lag, and gradients for these tables.
#pragma once
#include <algorithm>

#include "functions.h"
#include "problem.h"

namespace rfa {

// A table is mirrored, so that a row reads keys j, j + 1, ... from consecutive numbers: index j - position + keys - 1.
class LagTables {
 public:
  struct QueryRow {
    int64_t first;  // index of key 0
  };

  explicit LagTables(const Task& task, bool backward)
      : task_(task),
        middle_(task.p.keys - 1),
        size_(task.p.keys + (task.p.causal ? 2 * KEY_BLOCK : round_up(task.p.keys, KEY_BLOCK))),
        values_(3 * size_),
        sums_(backward ? 3 * size_ : 0) {
    for (int table = 0; table < 3; table++) {
      const float* from = task.p.tables + (table * task.p.heads + task.h) * task.p.lags;
      float* to = values_ + table * size_;
      const int64_t ahead = std::min(size_ - middle_, task.p.lags);  // lags 0, 1, ... from the middle on
      std::reverse_copy(from, from + middle_ + 1, to);
      std::copy_n(from, ahead, to + middle_);
      std::fill(to + middle_ + ahead, to + size_, from[task.p.lags - 1]);
    }
    const float* decay = task.p.tables + task.h * task.p.lags;
    far_ = std::partition_point(decay, decay + task.p.lags, [](float e) { return e > FAR; }) - decay;
  }

  // Whether E <= FAR between n queries and a block of keys, and E w c |q| |k| is below rounding; `reach` = c |q| |k|.
  bool decayed(int64_t first, int64_t n, int64_t start, float reach) const {
    const int64_t position = task_.p.keys - task_.p.queries + first;
    const int64_t behind = position - (start + KEY_BLOCK - 1), ahead = start - (position + n - 1);
    return std::max(behind, ahead) >= far_ && reach * widest() * FAR < 1e-6f;
  }

  QueryRow row(int64_t i) const { return {middle_ - (task_.p.keys - task_.p.queries + std::min(i, task_.p.queries - 1))}; }

  // The log2 of what all keys up to j weigh at most for query i, over the eps that they may weigh; see certified.py.
  float tail(const QueryRow& row, int64_t j) const { return values_[size_ + row.first + j] + task_.p.tail[task_.h]; }

  // Of keys start, start + 1, ...
  RFA_INLINE_MEMBER Pairs pairs(const QueryRow& row, int64_t start, int64_t) const {
    const float* from = values_ + row.first + start;
    return {from, from + size_, from + 2 * size_};
  }

  RFA_INLINE_MEMBER void add(QueryRow& row, int64_t start, int64_t n, GradPairs grads) {
    float* to = sums_ + row.first + start;
    least_ = std::min(least_, row.first + start), most_ = std::max(most_, row.first + start + n);
    for (int64_t j = 0; j < n; j += LANES) {
      add_to(to + j, load(grads.decay + j));
      add_to(to + size_ + j, load(grads.bias + j));
      add_to(to + 2 * size_ + j, load(grads.weight + j));
    }
  }

  void end_row(int64_t, const QueryRow&) {}
  void begin_block(int64_t) { least_ = size_, most_ = 0; }

  // Into double after each block of keys: a sum over all the rows of a long sequence would lose digits in float.
  void end_block(int64_t, int64_t) {
    double* to = task_.p.grad_tables + (task_.row_index() * task_.p.slices + task_.slice) * 3 * task_.p.lags;
    for (int table = 0; table < 3; table++, to += task_.p.lags) {
      float* from = sums_ + table * size_;
      for (int64_t n = least_; n < most_; n++) {
        to[lag(n)] += from[n];
        from[n] = 0.0f;
      }
    }
  }

  void finish(double*) {}

 private:
  // The largest w. Decoding does not need it, and would look through all lags for each token.
  float widest() const {
    if (widest_ < 0.0f) {
      const float* weight = task_.p.tables + (2 * task_.p.heads + task_.h) * task_.p.lags;
      widest_ = *std::max_element(weight, weight + task_.p.lags) / (task_.p.score_kind == STUDENT_T ? ONE : 1.0f);
    }
    return widest_;
  }

  int64_t lag(int64_t n) const { return std::min(n < middle_ ? middle_ - n : n - middle_, task_.p.lags - 1); }

  const Task& task_;
  int64_t middle_, size_, far_;  // far_: the first lag at which all has decayed
  int64_t least_ = 0, most_ = 0;  // the part of the sums that a block of keys has added to
  mutable float widest_ = -1.0f;
  Buffer<float> values_, sums_;
};

}  // namespace rfa
