// The Kalman filter, its log density of each row, and the smoother.
#include "smoother.h"

namespace rfa {

template <int N> void run_filter(const Problem& p, Matrices<N> of, int64_t index) {
  Group<N> group(p, of, index);
  Smoother<N> smoother(group);
  const int64_t n = p.states;
  std::vector<double> density(size_t(group.count));
  bool known = !p.diffuse;
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
    std::fill(density.begin(), density.end(), 0.0);
    const int64_t kept = p.density && !group.noise_is_kept(k) ? -1 : 1;
    group.update(k, p.density ? density.data() : nullptr);
    known = known && !group.shows();
    if (p.density) p.counts[index * p.length + k] = known ? kept : 0;
    for (int64_t s = 0; s < group.count; s++) {
      const int64_t at = (group.first + s) * p.length + k;
      if (p.density) p.density[at] = known ? density[s] : 0;
      if (p.mean) std::copy(&group.means[s * n], &group.means[(s + 1) * n], p.mean + at * n);
      if (p.least_squares) p.least_squares[at] = group.least_squares[s];
    }
    double* covariance = p.covariance ? p.covariance + (index * p.length + k) * n * n : smoother.scratch();
    if (p.smooth) smoother.keep(k);
    known = group.steps.write(group.state, covariance);
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
