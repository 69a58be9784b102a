// out_i = sum_j 2^(z_ij - z_i) E_ij v_j for the query blocks of one task.
#pragma once
#include <cmath>

#include "factors.h"
#include "score.h"
#include "visibility.h"

namespace rfa {

constexpr float SAFE_LOW = 8.6736174e-19f;   // 2^-60: terms that underflow are below the rounding of the sum
constexpr float SAFE_HIGH = 1.2676506e+30f;  // 2^100

template <int64_t SCORE, class Prior> class Forward {
 public:
  explicit Forward(const Task& task)
      : task_(task),
        turns_(task),
        prior_(task, false),
        visibility_(task),
        padded_(round_up(task.p.keys, KEY_BLOCK)),
        keys_(task, padded_, task.channels, task.p.keys),
        values_(task, padded_, task.value_channels, task.value_channels == task.p.value_channels ? task.p.keys : 0),
        key_norms_(padded_),
        queries_(task, QUERY_BLOCK, task.channels),
        out_(QUERY_BLOCK * task.value_channels),
        tile_(task, GROUP, KEY_BLOCK),
        parts_(QUERY_BLOCK * LANES),
        mask_(KEY_BLOCK) {}

  void run() {
    if (task_.slice * QUERY_BLOCK >= task_.p.queries) return;
    pack_keys();
    const int64_t step = task_.p.slices * QUERY_BLOCK;
    for (int64_t first = task_.slice * QUERY_BLOCK; first < task_.p.queries; first += step) query_block(first);
  }

 private:
  void pack_keys() {
    const Problem& p = task_.p;
    Buffer<float> rows(KEY_BLOCK * task_.channels);
    for (int64_t start = 0; start < p.keys; start += KEY_BLOCK) {
      const int64_t n = std::min(KEY_BLOCK, p.keys - start);
      pack_rows(p.key, task_, turns_.key, start, n, p.channels, task_.channels, true, rows, &nonfinite_keys_);
      keys_.pack(rows, start, n);
      for (int64_t j = 0; j < n; j++) {
        key_norms_[start + j] = squared_norm(rows + j * task_.channels, task_.channels);
        longest_ = std::max(longest_, key_norms_[start + j]);
      }
      pack_rows(p.value, task_, turns_.value, start, n, p.value_channels, task_.value_channels, true,
                values_ + start * task_.value_channels, &nonfinite_values_);
      values_.convert(start);
    }
  }

  // The bound on a row's scores takes the place of their maximum. Where the sum then leaves the safe range, the block is
  // computed again with the maxima themselves.
  void query_block(int64_t first) {
    const Problem& p = task_.p;
    const int64_t n = std::min(QUERY_BLOCK, p.queries - first);
    std::memset(queries_, 0, QUERY_BLOCK * task_.channels * sizeof(float));
    nonfinite_queries_.clear();
    pack_rows(p.query, task_, turns_.query, first, n, p.channels, task_.channels, false, queries_, &nonfinite_queries_);
    queries_.convert(0, QUERY_BLOCK);
    const float coefficient = task_.scalar(0), bound = p.bound[task_.h];
    float widest = 0.0f;
    for (int64_t i = 0; i < QUERY_BLOCK; i++) {
      const float norm = squared_norm(queries_ + i * task_.channels, task_.channels);
      const float reach = SCORE == DOT_PRODUCT ? std::fabs(coefficient) * std::sqrt(norm * longest_) : 0.0f;
      rows_[i] = {norm, coefficient, bound + reach, 0.0f};
      widest = std::max(widest, norm);
    }
    reach_ = std::fabs(coefficient) * std::sqrt(widest * longest_);
    pass<false>(first, n);
    bool all_safe = true, safe[QUERY_BLOCK];
    for (int64_t i = 0; i < n; i++) {
      safe[i] = totals_[i] > SAFE_LOW && totals_[i] < SAFE_HIGH;
      all_safe = all_safe && safe[i];
    }
    if (!all_safe) {
      std::fill_n(totals_, QUERY_BLOCK, -INFINITY);
      pass<true>(first, n);
      for (int64_t i = 0; i < n; i++)  // the others keep their bound: no row may change its neighbours
        if (!safe[i]) rows_[i].offset = totals_[i] > -INFINITY ? totals_[i] : 0.0f;
      pass<false>(first, n);
    }
    finish(first, n);
  }

  // MAXIMA: `totals_` becomes the highest score of each row; else the sum of weights, LANES `parts_` of it at first, and
  // `out_` that of values.
  template <bool MAXIMA> void pass(int64_t first, int64_t n) {
    if (!MAXIMA) {
      std::memset(parts_, 0, QUERY_BLOCK * LANES * sizeof(float));
      std::memset(out_, 0, QUERY_BLOCK * task_.value_channels * sizeof(float));
    }
    bool anchored[QUERY_BLOCK / GROUP];
    for (int64_t group = 0; group < n; group += GROUP)
      anchored[group / GROUP] = sees_near(prior_, visibility_, task_.p, first + group, reach_);
    if (!MAXIMA && task_.p.tail) {
      pass_backwards(first, n, anchored);
    } else {
      for (int64_t start = 0; start < task_.p.keys; start += KEY_BLOCK)
        for (int64_t group = 0; group < n; group += GROUP) {
          const VisibleKeys seen = visibility_.look(first + group, GROUP, start);
          if (seen.keys) tiles<MAXIMA>(first, group, start, seen, anchored[group / GROUP]);
        }
    }
    if (!MAXIMA)
      for (int64_t i = 0; i < QUERY_BLOCK; i++) totals_[i] = sum(load(parts_ + i * LANES));
  }

  // The newest keys first. A group of queries stops where no older key can change its estimates.
  void pass_backwards(int64_t first, int64_t n, const bool* anchored) {
    int64_t open = (n + GROUP - 1) / GROUP, start = visibility_.newest_block(first, n) * KEY_BLOCK;
    bool done[QUERY_BLOCK / GROUP] = {};
    for (; open && start >= 0; start -= KEY_BLOCK)
      for (int64_t group = 0; group < n; group += GROUP) {
        if (done[group / GROUP]) continue;
        const VisibleKeys seen = visibility_.look(first + group, GROUP, start);
        if (seen.keys) tiles<false>(first, group, start, seen, anchored[group / GROUP]);
        if (start > 0 && !certified(first, group, n, start)) continue;
        *task_.first_block(first + group) = static_cast<int32_t>(start / KEY_BLOCK);
        done[group / GROUP] = true, open--;
      }
  }

  // Whether all keys before `start` together weigh next to nothing for each query of a group, whatever they hold.
  bool certified(int64_t first, int64_t group, int64_t n, int64_t start) const {
    for (int64_t i = group; i < std::min(group + GROUP, n); i++) {
      const int64_t j = visibility_.last_before(first + i, start);
      if (j < 0) continue;
      const float total = sum(load(parts_ + i * LANES));
      if (!(prior_.tail(prior_.row(first + i), j) <= rows_[i].offset + std::log2(total))) return false;
    }
    return true;
  }

  template <bool MAXIMA> void tiles(int64_t first, int64_t group, int64_t start, VisibleKeys seen, bool anchored) {
    const bool near = SCORE == DOT_PRODUCT || !anchored || !prior_.decayed(first + group, GROUP, start, reach_);
    if (near)
      keys_.scores(queries_, group, start, seen.keys, tile_);
    else
      std::memset(tile_, 0, GROUP * KEY_BLOCK * sizeof(float));
    for (int64_t i = 0; i < GROUP; i++) {
      const Pairs pairs = prior_.pairs(prior_.row(first + group + i), start, seen.keys);
      const RowOfScores row = rows_[group + i];
      const float* norms = key_norms_ + start;
      float* tile = tile_ + i * KEY_BLOCK;
      visibility_.mask(first + group + i, start, seen, mask_);
      if (MAXIMA)
        totals_[group + i] = std::max(totals_[group + i], highest<SCORE>(pairs, row, seen, norms, mask_, tile));
      else
        add_to(parts_ + (group + i) * LANES, weigh<SCORE>(pairs, row, seen, norms, mask_, tile));
    }
    if (near && !MAXIMA)
      values_.accumulate(tile_, 0, start, seen.keys, out_ + group * task_.value_channels);
  }

  void finish(int64_t first, int64_t n) {
    const Problem& p = task_.p;
    for (int64_t i = 0; i < n; i++) {
      const float total = totals_[i], inverse = total == 0.0f ? 0.0f : 1.0f / total;
      float* out = out_ + i * task_.value_channels;
      for (int64_t c = 0; c < p.value_channels; c++) out[c] *= inverse;
      turn(out, turns_.out.c(first + i), turns_.out.s(first + i), 1.0f, p.out.at(task_.b, task_.h, first + i),
           p.value_channels);
      const double log_sum = total == 0.0f ? -INFINITY : rows_[i].offset + std::log2(static_cast<double>(total));
      const bool sharp = largest(load(parts_ + i * LANES)) > SHARP * total;
      p.log_sum[task_.row_index() * p.queries + first + i] = marked(log_sum, sharp);
    }
    for (int64_t i : nonfinite_queries_) fill_with_nan(i, true);
    for (int64_t i = first; i < first + n && !nonfinite_keys_.empty(); i++)
      if (visibility_.sees_any(i, nonfinite_keys_)) fill_with_nan(i, true);
    for (int64_t i = first; i < first + n && !nonfinite_values_.empty(); i++)
      if (visibility_.sees_any(i, nonfinite_values_)) fill_with_nan(i, false);
  }

  // A query that sees NaN or infinity becomes NaN. One that sees no key keeps its zeros.
  void fill_with_nan(int64_t i, bool score) {
    const Problem& p = task_.p;
    double* log_sum = p.log_sum + task_.row_index() * p.queries + i;
    if (*log_sum == -INFINITY) return;
    std::fill_n(p.out.at(task_.b, task_.h, i), p.value_channels, NAN);
    if (score) *log_sum = NAN;
  }

  const Task& task_;
  Turns turns_;
  Prior prior_;
  Visibility visibility_;
  int64_t padded_;
  ColumnFactor keys_;
  RowFactor values_;
  Buffer<float> key_norms_;
  LeftFactor queries_;
  Buffer<float> out_;
  LeftFactor tile_;
  Buffer<float> parts_;
  Buffer<int32_t> mask_;
  std::vector<int64_t> nonfinite_keys_, nonfinite_values_, nonfinite_queries_;
  RowOfScores rows_[QUERY_BLOCK];
  float totals_[QUERY_BLOCK], longest_ = 0.0f;  // longest_: of the keys' squared norms
  float reach_ = 0.0f;                           // c |q| |k| at most
};

}  // namespace rfa
