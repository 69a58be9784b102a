// Gradients of one task: a loop over blocks of keys and within it over blocks of queries. Weights are formed from
// `log_sum` again.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "factors.h"
#include "score.h"
#include "visibility.h"

namespace rfa {

template <int64_t SCORE, class Prior> class Backward {
 public:
  explicit Backward(const Task& task)
      : task_(task),
        turns_(task),
        prior_(task, true),
        visibility_(task),
        padded_(round_up(task.p.queries, QUERY_BLOCK)),
        queries_(task, padded_, task.channels),
        grads_(task, padded_, task.value_channels),
        query_sums_(padded_ * task.channels),
        norm_sums_(padded_),
        turned_(task.value_channels),
        rows_(padded_),
        means_(padded_),
        keys_(task, KEY_BLOCK, task.channels),
        key_columns_(task, KEY_BLOCK, task.channels),
        value_rows_(KEY_BLOCK * task.value_channels),
        value_columns_(task, KEY_BLOCK, task.value_channels),
        key_norms_(KEY_BLOCK),
        key_norm_sums_(KEY_BLOCK),
        key_sums_(task, queries_, padded_, task.channels),
        value_sums_(task, grads_, padded_, task.value_channels),
        slopes_(task, QUERY_BLOCK, KEY_BLOCK),
        weights_(QUERY_BLOCK * KEY_BLOCK),
        grad_pairs_(3 * KEY_BLOCK),
        mask_(KEY_BLOCK),
        anchored_(padded_ / GROUP),
        oldest_(padded_ / GROUP),
        newest_(padded_ / GROUP) {}

  void run() {
    pack_queries();
    look_for_near();
    look_for_visits();
    sharpen();
    const int64_t step = task_.p.slices * KEY_BLOCK;
    for (int64_t start = task_.slice * KEY_BLOCK; start < task_.p.keys; start += step) key_block(start);
    finish_queries();
    double* scalars = task_.p.grad_scalars + (task_.row_index() * task_.p.slices + task_.slice) * 6;
    prior_.finish(scalars);
    scalars[0] = grad_coefficient_;
  }

 private:
  // grad_out is scaled by ln 2: scores are in bits.
  void pack_queries() {
    const Problem& p = task_.p;
    std::vector<int64_t> nonfinite;
    pack_rows(p.query, task_, turns_.query, 0, p.queries, p.channels, task_.channels, false, queries_, &nonfinite);
    pack_rows(p.grad_out, task_, turns_.out, 0, p.queries, p.value_channels, task_.value_channels, false, grads_, &nonfinite);
    for (int64_t i = 0; i < padded_ * task_.value_channels; i++) grads_[i] *= LN2;
    if (p.brgemm) round_to_bfloat16(grads_, padded_ * task_.value_channels);
    queries_.convert(0, padded_);
    grads_.convert(0, padded_);
    key_sums_.transpose();
    value_sums_.transpose();
    const double* log_sum = p.log_sum + task_.row_index() * p.queries;
    const float* grad_log_sum = p.grad_log_sum + task_.row_index() * p.queries;
    for (int64_t i = 0; i < padded_; i++) {
      const bool seeing = i < p.queries && log_sum[i] != -INFINITY && asked(i);  // others get weights 2^-inf = 0
      const float norm = squared_norm(queries_ + i * task_.channels, task_.channels);
      const float offset = seeing ? static_cast<float>(log_sum[i]) : INFINITY;
      rows_[i] = {norm, task_.scalar(0), offset, seeing ? static_cast<float>(log_sum[i] - offset) : 0.0f};
      widest_ = std::max(widest_, norm);
      if (!seeing) continue;
      means_[i] = mean(inner(i), grad_log_sum[i]);
      if (!std::isfinite(means_[i].part + means_[i].rest)) nonfinite.push_back(i);
    }
    for (int64_t i : nonfinite)  // NaN for the keys that it sees, zero for the others
      if (rows_[i].offset != INFINITY) rows_[i] = {0.0f, task_.scalar(0), NAN, 0.0f}, means_[i] = {0.0f, 0.0f};
  }

  // ln2 <grad_out, out>, in bfloat16 with the rounded gradient that values are multiplied with.
  double inner(int64_t i) const {
    const Problem& p = task_.p;
    const float *grad = p.grad_out.at(task_.b, task_.h, i), *out = p.out.at(task_.b, task_.h, i);
    double unit = LN2;
    if (p.brgemm) {
      turn(out, turns_.out.c(i), turns_.out.s(i), -1.0f, turned_, p.value_channels);
      grad = grads_ + i * task_.value_channels, out = turned_, unit = 1.0;
    }
    double inner = 0.0;
    for (int64_t c = 0; c < p.value_channels; c++) inner += static_cast<double>(grad[c]) * out[c];
    return unit * inner;
  }

  static Mean mean(double inner, float grad_log_sum) {
    const float part = static_cast<float>(inner);
    return {part, grad_log_sum - static_cast<float>(inner - part)};
  }

  // Whether a row has an incoming gradient. Without one it passes none on, whatever it sees.
  bool asked(int64_t i) const {
    const Problem& p = task_.p;
    const float* grad = p.grad_out.at(task_.b, task_.h, i);
    return p.grad_log_sum[task_.row_index() * p.queries + i] != 0.0f ||
           std::any_of(grad, grad + p.value_channels, [](float g) { return g != 0.0f; });
  }

  // Where one weight is nearly 1, `E <grad_out, v> - <grad_out, out>` is far smaller than the error of either term.
  // There <grad_out, out> is formed from the same products that it is subtracted from. Such rows cost one more forward
  // pass.
  void sharpen() {
    const Problem& p = task_.p;
    const double* log_sum = p.log_sum + task_.row_index() * p.queries;
    std::vector<int64_t> groups;
    for (int64_t first = 0; first < p.queries; first += GROUP)
      if (std::any_of(log_sum + first, log_sum + std::min(first + GROUP, p.queries), is_marked)) groups.push_back(first);
    if (groups.empty()) return;
    std::vector<double> totals(padded_), inner(padded_);
    for (int64_t start = 0; start < p.keys; start += KEY_BLOCK) {
      const auto sees = [&](int64_t first) { return look(first, start).keys > 0; };
      if (std::none_of(groups.begin(), groups.end(), sees)) continue;
      pack_keys(start);
      for (int64_t first : groups) {
        const VisibleKeys seen = look(first, start);
        if (!seen.keys) continue;
        products(first, seen, slopes_, weights_);
        for (int64_t i = 0; i < GROUP; i++) {
          visibility_.mask(first + i, start, seen, mask_);
          add_mean<SCORE>(prior_.pairs(prior_.row(first + i), start, seen.keys), rows_[first + i], seen, key_norms_, mask_,
                          slopes_ + i * KEY_BLOCK, weights_ + i * KEY_BLOCK, &totals[first + i], &inner[first + i]);
        }
      }
    }
    for (int64_t first : groups)
      for (int64_t i = first; i < std::min(first + GROUP, p.queries); i++)
        if (std::isfinite(totals[i]) && totals[i] > 0.0) {
          rows_[i].rest += static_cast<float>(std::log2(totals[i]));
          means_[i] = mean(inner[i] / totals[i], p.grad_log_sum[task_.row_index() * p.queries + i]);
        }
  }

  // q.k and ln2 <grad_out, v> of a group with the block of keys that is packed.
  void products(int64_t first, VisibleKeys seen, float* dots, float* values) {
    key_columns_.scores(queries_, first, 0, seen.keys, dots);
    value_columns_.scores(grads_, first, 0, seen.keys, values);
  }

  void look_for_near() {
    for (int64_t first = 0; first < task_.p.queries; first += GROUP)
      anchored_[first / GROUP] = sees_near(prior_, visibility_, task_.p, first, 0.0f);
  }

  // The blocks of keys that each group of queries visits: as the forward pass has, and none that it cannot see.
  void look_for_visits() {
    for (int64_t first = 0; first < task_.p.queries; first += GROUP) {
      oldest_[first / GROUP] = task_.p.first_block ? *task_.first_block(first) : 0;
      newest_[first / GROUP] = static_cast<int32_t>(visibility_.newest_block(first, GROUP));
    }
  }

  // The keys of a block that a group of queries sees and has visited.
  VisibleKeys look(int64_t first, int64_t start) const {
    const int64_t block = start / KEY_BLOCK;
    if (block < oldest_[first / GROUP] || block > newest_[first / GROUP]) return {0, 0};
    return visibility_.look(first, GROUP, start);
  }

  void pack_keys(int64_t start) {
    const Problem& p = task_.p;
    const int64_t n = std::min(KEY_BLOCK, p.keys - start);
    std::vector<int64_t> nonfinite;  // not used: the rows that see them have a log2 sum or an estimate of NaN
    std::memset(keys_, 0, KEY_BLOCK * task_.channels * sizeof(float));
    std::memset(value_rows_, 0, KEY_BLOCK * task_.value_channels * sizeof(float));
    pack_rows(p.key, task_, turns_.key, start, n, p.channels, task_.channels, true, keys_, &nonfinite);
    pack_rows(p.value, task_, turns_.value, start, n, p.value_channels, task_.value_channels, true, value_rows_, &nonfinite);
    keys_.convert(0);
    key_columns_.pack(keys_, 0, KEY_BLOCK);
    value_columns_.pack(value_rows_, 0, KEY_BLOCK);
    float longest = 0.0f;
    for (int64_t j = 0; j < KEY_BLOCK; j++) {
      key_norms_[j] = squared_norm(keys_ + j * task_.channels, task_.channels);
      longest = std::max(longest, key_norms_[j]);
    }
    // The gradient of a query of zeros is E c w |k| alone.
    reach_ = std::fabs(task_.scalar(0)) * std::sqrt(std::max(widest_, longest) * longest);
  }

  void key_block(int64_t start) {
    const Problem& p = task_.p;
    const int64_t n = std::min(KEY_BLOCK, p.keys - start);
    pack_keys(start);
    std::memset(key_norm_sums_, 0, KEY_BLOCK * sizeof(float));
    key_sums_.clear();
    value_sums_.clear();
    prior_.begin_block(start);
    for (int64_t first = 0; first < p.queries; first += QUERY_BLOCK) query_block(first, start);
    prior_.end_block(start, n);
    finish_keys(start, n);
  }

  void query_block(int64_t first, int64_t start) {
    const int64_t groups = (std::min(QUERY_BLOCK, task_.p.queries - first) + GROUP - 1) / GROUP;
    VisibleKeys seen[QUERY_BLOCK / GROUP];
    int64_t most = 0;
    for (int64_t g = 0; g < groups; g++) {
      seen[g] = look(first + g * GROUP, start);
      most = std::max(most, seen[g].keys);
    }
    if (!most) return;
    const int64_t read = std::min(KEY_BLOCK, round_up(most, ROWS));
    int64_t near = 0;  // groups from here on have decayed
    for (int64_t g = 0; g < groups; g++)
      if (tiles(first + g * GROUP, start, seen[g], read, slopes_ + g * GROUP * KEY_BLOCK, weights_ + g * GROUP * KEY_BLOCK))
        near = g + 1;
    value_sums_.add(weights_, first, seen, near);
    key_sums_.add(slopes_, first, seen, near);
  }

  // GROUP queries against a block of keys. Pairs that are not seen are cleared where the products that follow read them.
  // Returns false where all keys have decayed: then only norms and prior have gradients.
  bool tiles(int64_t first, int64_t start, VisibleKeys seen, int64_t read, float* slopes, float* weights) {
    const bool near = SCORE == DOT_PRODUCT || !anchored_[first / GROUP] || !prior_.decayed(first, GROUP, start, reach_);
    if (near) {
      products(first, seen, slopes, weights);
    } else {
      std::memset(slopes, 0, GROUP * KEY_BLOCK * sizeof(float));
      std::memset(weights, 0, GROUP * KEY_BLOCK * sizeof(float));
    }
    for (int64_t i = 0; i < GROUP; i++) {
      const int64_t row = first + i;
      float *slope = slopes + i * KEY_BLOCK, *weight = weights + i * KEY_BLOCK;
      for (int64_t j = seen.keys; j < read; j++) slope[j] = weight[j] = 0.0f;
      if (!seen.keys) continue;
      visibility_.mask(row, start, seen, mask_);
      auto query_row = prior_.row(row);
      const GradPairs grads{grad_pairs_, grad_pairs_ + KEY_BLOCK, grad_pairs_ + 2 * KEY_BLOCK};
      row_gradients<SCORE>(prior_.pairs(query_row, start, seen.keys), rows_[row], means_[row], seen, key_norms_, mask_,
                           slope, weight, grads, key_norm_sums_, norm_sums_ + row, &grad_coefficient_);
      prior_.add(query_row, start, seen.keys, grads);
      prior_.end_row(row, query_row);
    }
    if (near)
      keys_.accumulate(slopes_, first % QUERY_BLOCK, 0, seen.keys, query_sums_ + first * task_.channels);
    return near && seen.keys;
  }

  // The product is rounded as the terms that it is added to: for equal states the sum is exactly 0.
  void add_multiple(float factor, const float* state, float* sums) const {
    for (int64_t c = 0; c < task_.channels; c += LANES) {
      Floats product = load(state + c) * factor;
      rounded(product);
      add_to(sums + c, product);
    }
  }

  void finish_keys(int64_t start, int64_t n) {
    const Problem& p = task_.p;
    for (int64_t j = 0; j < n; j++) {
      const int64_t t = start + j;
      float *key = key_sums_.row(j), *value = value_sums_.row(j);
      add_multiple(2.0f * key_norm_sums_[j], keys_ + j * task_.channels, key);
      for (int64_t c = 0; c < p.value_channels; c++) value[c] *= BITS;
      turn(key, turns_.key.c(t), turns_.key.s(t), 1.0f, p.grad_key.at(task_.b, task_.h, t), p.channels);
      turn(value, turns_.value.c(t), turns_.value.s(t), 1.0f, p.grad_value.at(task_.b, task_.h, t), p.value_channels);
    }
  }

  void finish_queries() {
    const Problem& p = task_.p;
    for (int64_t i = 0; i < p.queries; i++) {
      float *sums = query_sums_ + i * task_.channels, *query = queries_ + i * task_.channels;
      add_multiple(2.0f * norm_sums_[i], query, sums);
      turn(sums, turns_.query.c(i), turns_.query.s(i), 1.0f,
           p.grad_query.at(task_.b, task_.h, i) + task_.slice * p.query_slice, p.channels);
    }
  }

  const Task& task_;
  Turns turns_;
  Prior prior_;
  Visibility visibility_;
  int64_t padded_;
  LeftFactor queries_, grads_;
  Buffer<float> query_sums_, norm_sums_, turned_;
  Buffer<RowOfScores> rows_;
  Buffer<Mean> means_;
  RowFactor keys_;
  ColumnFactor key_columns_;
  Buffer<float> value_rows_;
  ColumnFactor value_columns_;
  Buffer<float> key_norms_, key_norm_sums_;
  KeySums key_sums_, value_sums_;
  LeftFactor slopes_;
  Buffer<float> weights_, grad_pairs_;
  Buffer<int32_t> mask_, anchored_, oldest_, newest_;  // oldest_, newest_: the first and last blocks of keys of groups
  double grad_coefficient_ = 0.0;
  float widest_ = 0.0f, reach_ = 0.0f;  // the largest |q|^2; c |q| |k| at most
};

}  // namespace rfa
