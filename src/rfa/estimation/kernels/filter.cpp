// The Kalman filter and the smoother of many series along a grid.
#include "smoother.h"

extern "C" int64_t rfa_filter_problem_size() { return sizeof(rfa::Problem); }

// 0, or 1 where there is no memory.
extern "C" int rfa_filter(const rfa::Problem* p) {
  int failed = 0;
#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
  for (int64_t index = 0; index < p->covariances; index++) try {
      rfa::with_size(p->states, [&](auto of) { rfa::run_filter(*p, of, index); });
    } catch (const std::exception&) {
#pragma omp atomic write
      failed = 1;
    }
  return failed;
}
