// The Kalman filter and the smoother.
#include "smoother.h"

namespace rfa {

template <int N> void run_filter(const Problem& p, Matrices<N> of, int64_t index) {
  Group<N> group(p, of, index);
  Smoother<N> smoother(group);
  const int64_t n = p.states;
  for (int64_t k = 0; k < p.length; k++) {
    if (k && !group.predict(k)) {
      p.overflow[index] = k;
      return;
    }
    if (p.predicted_mean) {
      std::copy(group.means.begin(), group.means.end(), p.predicted_mean + index * p.length * n + k * n);
      std::copy(group.state.p.begin(), group.state.p.end(), p.predicted_covariance + (index * p.length + k) * n * n);
    }
    if (!k && !group.steps.finite(group.state.p.data())) p.overflow[index] = 0;
    group.update(k);
    for (int64_t s = 0; s < group.count; s++) {
      const int64_t at = (group.first + s) * p.length + k;
      std::copy(&group.means[s * n], &group.means[(s + 1) * n], p.mean + at * n);
      if (p.least_squares) p.least_squares[at] = group.least_squares[s];
    }
    if (p.smooth) smoother.keep(k);
    group.steps.write(group.state, p.covariance + (index * p.length + k) * n * n);
  }
  if (p.smooth) smoother.run();
}

}  // namespace rfa

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
