// Which blocks of keys have decayed for some queries, from the cumulative decays M of both.
#pragma once
#include <algorithm>
#include <vector>

#include "problem.h"

namespace rfa {

class DecayRange {
 public:
  // `sums`: M of all keys.
  DecayRange(const double* sums, int64_t keys) {
    for (int64_t start = 0; start < keys; start += KEY_BLOCK) {
      const auto ends = std::minmax_element(sums + start, sums + std::min(start + KEY_BLOCK, keys));
      least_.push_back(*ends.first), most_.push_back(*ends.second);
    }
  }

  // Whether E <= FAR between the block at `start` and queries [first, first + n) of `queries`, whose M are `of_queries`.
  bool far(const double* of_queries, int64_t queries, int64_t first, int64_t n, int64_t start) const {
    const int64_t last = std::min(first + n, queries);
    const auto ends = std::minmax_element(of_queries + std::min(first, last - 1), of_queries + last);
    const double apart = std::max(*ends.first - most_[start / KEY_BLOCK], least_[start / KEY_BLOCK] - *ends.second);
    return apart >= 27.725887;  // -log FAR
  }

 private:
  std::vector<double> least_, most_;  // M of each block of keys
};

}  // namespace rfa
