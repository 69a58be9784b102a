// The recursive robust filter of many series along a grid.
#include "robust.h"

extern "C" int64_t rfa_robust_constants_size() { return sizeof(rfa::RobustConstants); }

// As rfa_filter.
extern "C" int rfa_robust_filter(const rfa::Problem* p) {
  int failed = 0;
#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
  for (int64_t index = 0; index < p->series; index++) try {
      rfa::with_size(p->states, [&](auto of) { rfa::RobustFilter<decltype(of)::SIZE>(*p, of, index).run(); });
    } catch (const std::exception&) {
#pragma omp atomic write
      failed = 1;
    }
  return failed;
}
