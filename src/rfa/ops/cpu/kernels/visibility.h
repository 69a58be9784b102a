// The keys that a few queries see. Blocks that no query sees are skipped; a mask is made only where it is needed.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "problem.h"

namespace rfa {

struct VisibleKeys {
  int64_t keys;   // so many keys of the block are computed, a multiple of COLUMNS; 0: none is seen
  int64_t clear;  // so many of them, from the first on, are seen by all rows and need no mask; a multiple of LANES
};

class Visibility {
 public:
  explicit Visibility(const Task& task)
      : keys_(task.p.keys), queries_(task.p.queries), causal_(task.p.causal), query_times_(task.query_times()) {
    const int64_t padded = round_up(keys_, KEY_BLOCK);
    if (!causal_ && !task.p.key_groups) return;  // all keys are seen
    times_.assign(padded, INFINITY);
    std::copy_n(task.key_times(), keys_, times_.begin());
    if (task.p.key_groups) {
      groups_.assign(padded, -1);
      std::copy_n(task.p.key_groups + task.b * keys_, keys_, groups_.begin());
      query_groups_ = task.p.query_groups + task.b * queries_;
    }
    for (int64_t j = 0; j < padded; j += KEY_BLOCK) blocks_.push_back(extremes(j, std::min(keys_, j + KEY_BLOCK)));
  }

  // The keys that rows [first, first + n) see in the block that starts at `start`.
  VisibleKeys look(int64_t first, int64_t n, int64_t start) const {
    int64_t seen = std::min(KEY_BLOCK, keys_ - start);
    if (blocks_.empty()) {
      if (seen == KEY_BLOCK) return {KEY_BLOCK, KEY_BLOCK};
      return {round_up(seen, COLUMNS), seen / LANES * LANES};
    }
    const Extremes& block = blocks_[start / KEY_BLOCK];
    const int64_t last = std::min(first + n, queries_);
    double earliest = INFINITY, latest = -INFINITY;
    for (int64_t i = first; i < last; i++) {
      earliest = std::min(earliest, query_times_[i]);
      latest = std::max(latest, query_times_[i]);
    }
    bool whole = start + KEY_BLOCK <= keys_;
    if (query_groups_) {
      int32_t low = query_groups_[first], high = low;
      for (int64_t i = first; i < last; i++) {
        low = std::min(low, query_groups_[i]);
        high = std::max(high, query_groups_[i]);
      }
      if (block.most < low || block.least > high) return {0, 0};
      whole = whole && block.clean && block.least == block.most && low == high;
    }
    if (causal_) {
      if (block.first > latest) return {0, 0};
      while (seen > 0 && times_[start + seen - 1] > latest) seen--;
      whole = whole && block.last <= earliest;
    }
    if (whole) return {KEY_BLOCK, KEY_BLOCK};
    int64_t clear = 0;
    while (!query_groups_ && clear < seen && (!causal_ || times_[start + clear] <= earliest)) clear++;
    return {round_up(seen, COLUMNS), clear / LANES * LANES};
  }

  // The block of keys behind which no query of [first, first + n) sees a key.
  int64_t newest_block(int64_t first, int64_t n) const {
    int64_t block = (keys_ - 1) / KEY_BLOCK;
    if (!causal_) return block;
    const double latest = *std::max_element(query_times_ + first, query_times_ + std::min(first + n, queries_));
    while (block > 0 && blocks_[block].first > latest) block--;
    return block;
  }

  // The last key before `start` of query i's group; -1 where there is none. It may be later than the query.
  int64_t last_before(int64_t i, int64_t start) const {
    int64_t j = start - 1;
    while (query_groups_ && j >= 0 && groups_[j] != query_groups_[i]) j--;
    return j;
  }

  bool sees(int64_t i, int64_t j) const {
    return (!query_groups_ || groups_[j] == query_groups_[i]) && (!causal_ || times_[j] <= query_times_[i]);
  }

  bool sees_any(int64_t i, const std::vector<int64_t>& keys) const {
    return std::any_of(keys.begin(), keys.end(), [&](int64_t j) { return sees(i, j); });
  }

  // All bits set where query i sees key start + j, for the keys that are not clear.
  void mask(int64_t i, int64_t start, VisibleKeys seen, int32_t* out) const {
    i = std::min(i, queries_ - 1);
    for (int64_t j = seen.clear; j < seen.keys; j++)
      out[j] = -static_cast<int32_t>(!causal_ || times_[start + j] <= query_times_[i]);
    for (int64_t j = std::max(seen.clear, keys_ - start); j < seen.keys; j++) out[j] = 0;
    if (query_groups_)
      for (int64_t j = seen.clear; j < seen.keys; j++)
        out[j] &= -static_cast<int32_t>(groups_[start + j] == query_groups_[i]);
  }

 private:
  struct Extremes {
    double first, last;   // times of the keys that take part
    int32_t least, most;  // their groups
    bool clean;           // all take part
  };

  Extremes extremes(int64_t begin, int64_t end) const {
    Extremes e{INFINITY, -INFINITY, INT32_MAX, INT32_MIN, true};
    for (int64_t j = begin; j < end; j++) {
      const int32_t group = groups_.empty() ? 0 : groups_[j];
      if (group < 0) {
        e.clean = false;
        continue;
      }
      e.first = std::min(e.first, times_[j]);
      e.last = std::max(e.last, times_[j]);
      e.least = std::min(e.least, group);
      e.most = std::max(e.most, group);
    }
    return e;
  }

  int64_t keys_, queries_;
  bool causal_;
  const double* query_times_;
  const int32_t* query_groups_ = nullptr;
  std::vector<double> times_;
  std::vector<int32_t> groups_;
  std::vector<Extremes> blocks_;  // empty where all keys are seen
};

// Whether the queries see a block that has not decayed. Only then has a decayed block no effect on their estimate.
template <class Prior>
static bool sees_near(const Prior& prior, const Visibility& visibility, const Problem& p, int64_t first, float reach) {
  for (int64_t start = visibility.newest_block(first, GROUP) * KEY_BLOCK; start >= 0; start -= KEY_BLOCK)
    if (!prior.decayed(first, GROUP, start, reach) && visibility.look(first, GROUP, start).keys) return true;
  return false;
}

}  // namespace rfa
