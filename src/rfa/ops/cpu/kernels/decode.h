// A few queries against keys that stand in the frame already, as in decoding. Each key is read once and not copied.
#pragma once
#include <cmath>

#include "frame.h"
#include "number.h"
#include "score.h"
#include "visibility.h"

namespace rfa {

template <int64_t SCORE, class Prior> class Decode {
 public:
  explicit Decode(const Task& task)
      : task_(task),
        prior_(task, false),
        visibility_(task),
        scores_(round_up(task.p.keys, KEY_BLOCK)),
        norms_(KEY_BLOCK),
        out_(task.value_channels),
        mask_(KEY_BLOCK) {}

  void run() {
    for (int64_t i = task_.slice; i < task_.p.queries; i += task_.p.slices) query(i);
  }

 private:
  static constexpr int64_t AHEAD = 12;  // states

  void query(int64_t i) {
    const Problem& p = task_.p;
    const float* q = p.query.at(task_.b, task_.h, i);
    const RowOfScores row{dot(q, q, p.channels), task_.scalar(0), 0.0f, 0.0f};
    const auto query_row = prior_.row(i);
    Floats highest = all(-INFINITY), undefined = all(0.0f);
    SumSoFar so_far;
    int64_t oldest = (p.keys - 1) / KEY_BLOCK * KEY_BLOCK;  // the newest block comes first
    for (;; oldest -= KEY_BLOCK) {
      score_block(q, row, query_row, i, oldest, highest, undefined);
      if (p.tail) so_far.add(scores_ + oldest, largest(highest));
      if (oldest == 0 || (p.tail && certified(query_row, i, oldest, so_far))) break;
    }
    if (oldest == 0 && p.uncertified) {  // the bias falls by the same from each key to the one before
      const float dropped = 2.0f * prior_.tail(query_row, 0) - prior_.tail(query_row, 1);
      if (!(dropped <= so_far.log2())) p.uncertified[task_.row_index()]++;
    }
    std::fill_n(static_cast<float*>(out_), task_.value_channels, 0.0f);
    float most = sum(undefined) > 0.0f ? 0.0f : largest(highest), total = 0.0f;  // NaN must stay NaN
    for (int64_t start = oldest; most > -INFINITY && start < p.keys; start += KEY_BLOCK) {
      const int64_t n = std::min(KEY_BLOCK, p.keys - start);
      const float* decay = prior_.pairs(query_row, start, round_up(n, LANES)).decay;
      Floats weights = all(0.0f);
      for (int64_t j = 0; j < n; j += LANES) {
        float* at = scores_ + start + j;
        const Floats weight = exp2(load(at) - most);
        weights += weight;
        store(at, weight * load(decay + j));
      }
      total += sum(weights);
      with_number(p.number, [&](auto number) { add_values<decltype(number)>(start, n); });
    }
    float* out = p.out.at(task_.b, task_.h, i);
    for (int64_t c = 0; c < p.value_channels; c++) out[c] = total == 0.0f ? 0.0f : out_[c] / total;
    if (!p.log_sum) return;
    p.log_sum[task_.row_index() * p.queries + i] = total == 0.0f ? -INFINITY : most + std::log2(static_cast<double>(total));
  }

  // The sum of the weights of the blocks so far, in units of the largest one.
  struct SumSoFar {
    float most = -INFINITY, total = 0.0f;
    void add(const float* scores, float highest) {
      if (!(highest > -INFINITY)) return;
      Floats weights = all(0.0f);
      for (int64_t j = 0; j < KEY_BLOCK; j += LANES) weights += exp2(load(scores + j) - highest);
      total = total * std::exp2(most - highest) + sum(weights), most = highest;
    }
    float log2() const { return most + std::log2(total); }
  };

  // Whether all keys before `start` together weigh next to nothing, whatever they hold; see `Forward::certified`.
  template <class Row> bool certified(const Row& row, int64_t i, int64_t start, const SumSoFar& so_far) const {
    const int64_t j = visibility_.last_before(i, start);
    return j < 0 || prior_.tail(row, j) <= so_far.log2();
  }

  // The scores of a block of keys, -inf where a key is not seen.
  template <class Row>
  void score_block(const float* q, const RowOfScores& row, const Row& query_row, int64_t i, int64_t start, Floats& highest,
                   Floats& undefined) {
    const Problem& p = task_.p;
    const VisibleKeys seen = visibility_.look(i, 1, start);
    std::fill_n(scores_ + start, KEY_BLOCK, -INFINITY);
    if (!seen.keys) return;
    const int64_t n = std::min(seen.keys, p.keys - start);
    with_number(p.number, [&](auto number) { dots<decltype(number)>(q, start, n); });
    visibility_.mask(i, start, seen, mask_);
    score_row<SCORE>(prior_.pairs(query_row, start, seen.keys), row, seen.keys, norms_, scores_ + start);
    for (int64_t j = 0; j < seen.keys; j += LANES) {
      Floats z = load(scores_ + start + j);
      if (j >= seen.clear) z = choose(load(mask_ + j), z, all(-INFINITY));
      store(scores_ + start + j, z);
      highest = larger(highest, z);
      undefined += keep(all(1.0f), ~(z == z));
    }
  }

  // q.k and |k|^2 of `n` keys.
  template <class T> void dots(const float* q, int64_t start, int64_t n) {
    const Problem& p = task_.p;
    const float* norms = p.key_norm.data ? p.key_norm.at(task_.b, task_.h) : nullptr;
    for (int64_t j = 0; j < n; j++) {
      const T* k = p.key.as<T>(task_.b, task_.h, start + j);
      fetch(k + AHEAD * p.key.row, p.channels);
      scores_[start + j] = dot(q, k, p.channels);
      if (SCORE != DOT_PRODUCT) norms_[j] = norms ? norms[start + j] : dot(k, k, p.channels);
    }
  }

  // Asks for a later state early: memory is what decoding waits for. An address behind the last one does no harm.
  template <class T> RFA_INLINE_MEMBER static void fetch(const T* state, int64_t channels) {
    for (int64_t c = 0; c < channels; c += 64 / sizeof(T)) __builtin_prefetch(state + c);  // 64 bytes, a line
  }

  // Weighted values of `n` keys.
  template <class T> void add_values(int64_t start, int64_t n) {
    for (int64_t c = 0; c < task_.p.value_channels;) {
      if (c + 4 * LANES <= task_.p.value_channels) add_vectors<T, 4>(start, n, c);
      else if (c + 2 * LANES <= task_.p.value_channels) add_vectors<T, 2>(start, n, c);
      else if (c + LANES <= task_.p.value_channels) add_vectors<T, 1>(start, n, c);
      else add_rest<T>(start, n, c);
    }
  }

  // `N` vectors of channels from the c-th on, summed in registers.
  template <class T, int64_t N> RFA_INLINE_MEMBER void add_vectors(int64_t start, int64_t n, int64_t& c) {
    const Problem& p = task_.p;
    const T* value = p.value.as<T>(task_.b, task_.h, start) + c;
    Floats sums[N];
    for (int64_t v = 0; v < N; v++) sums[v] = load(out_ + c + v * LANES);
    for (int64_t j = 0; j < n; j++, value += p.value.row) {
      fetch(value + AHEAD * p.value.row, N * LANES);
      const float weight = scores_[start + j];
      if (weight == 0.0f) continue;  // an absent key may hold NaN
      for (int64_t v = 0; v < N; v++) sums[v] += load_as_float(value + v * LANES) * weight;
    }
    for (int64_t v = 0; v < N; v++) store(out_ + c + v * LANES, sums[v]);
    c += N * LANES;
  }

  template <class T> void add_rest(int64_t start, int64_t n, int64_t& c) {
    const T* value = task_.p.value.as<T>(task_.b, task_.h, start);
    for (; c < task_.p.value_channels; c++)
      for (int64_t j = 0; j < n; j++)
        if (const float weight = scores_[start + j]; weight != 0.0f)
          out_[c] += weight * from(value[j * task_.p.value.row + c]);
  }

  const Task& task_;
  Prior prior_;
  Visibility visibility_;
  Buffer<float> scores_, norms_, out_;
  Buffer<int32_t> mask_;
};

}  // namespace rfa
