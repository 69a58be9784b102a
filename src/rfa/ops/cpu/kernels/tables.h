// The prior of uniform times: E, b and w from tables over the lag, and gradients for these tables.
#pragma once
#include <algorithm>

#include "problem.h"

namespace rfa {

// A table is mirrored, so that a row reads keys j, j + 1, ... from consecutive places: place j - position + keys - 1.
class TablePrior {
 public:
  struct Pair {
    Floats decay, bias, weight;
  };
  struct Row {
    int64_t place;  // of key 0
  };

  explicit TablePrior(const Task& task, bool backward)
      : task_(task),
        middle_(task.p.keys - 1),
        size_(task.p.keys + std::max(task.p.causal ? KEY_BLOCK : int64_t{0}, round_up(task.p.keys, KEY_BLOCK))),
        values_(3 * size_),
        sums_(backward ? 3 * size_ : 0) {
    for (int table = 0; table < 3; table++) {
      const float* from = task.p.tables + (table * task.p.heads + task.h) * task.p.lags;
      for (int64_t n = 0; n < size_; n++) values_[table * size_ + n] = from[lag(n)];
    }
  }

  Row row(int64_t i) const { return {middle_ - (task_.p.keys - task_.p.queries + std::min(i, task_.p.queries - 1))}; }

  RFA_INLINE_MEMBER Pair at(const Row& row, int64_t j) const {
    const float* from = values_ + row.place + j;
    return {load(from), load(from + size_), load(from + 2 * size_)};
  }

  RFA_INLINE_MEMBER void add(Row& row, int64_t j, const Pair&, Floats decay, Floats bias, Floats weight) {
    float* to = sums_ + row.place + j;
    add_to(to, decay);
    add_to(to + size_, bias);
    add_to(to + 2 * size_, weight);
  }

  void end_row(int64_t, const Row&) {}
  void begin_block(int64_t) {}

  // Into double after each block of keys: a sum over all the rows of a long sequence would lose digits in float.
  void end_block(int64_t, int64_t) {
    double* to = task_.p.grad_tables + (task_.row_index() * task_.p.slices + task_.slice) * 3 * task_.p.lags;
    for (int table = 0; table < 3; table++, to += task_.p.lags) {
      float* from = sums_ + table * size_;
      for (int64_t n = 0; n < size_; n++) {
        to[lag(n)] += from[n];
        from[n] = 0.0f;
      }
    }
  }

  void finish(double*) {}

 private:
  int64_t lag(int64_t n) const { return std::min(n < middle_ ? middle_ - n : n - middle_, task_.p.lags - 1); }

  const Task& task_;
  int64_t middle_, size_;
  Buffer<float> values_, sums_;
};

}  // namespace rfa
