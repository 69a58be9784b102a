// Phi and V of the lags of many models.
#include "transitions.h"

extern "C" int64_t rfa_lags_size() { return sizeof(rfa::Lags); }

namespace rfa {

// Phi and V of some states in every model. Models in which A and Q of these states are equal share them.
void discretize(const Lags& p, const std::vector<int64_t>& members) {
  const int64_t n = p.states, s = int64_t(members.size()), ss = s * s;
  std::vector<double> dynamics, diffusion;
  std::vector<int64_t> source(size_t(p.models), 0);
  for (int64_t model = 0; model < p.models; model++) {
    for (auto [from, to] : {std::pair(p.dynamics, &dynamics), std::pair(p.diffusion, &diffusion)}) {
      const auto own = selected(from + model * n * n, n, members);
      to->insert(to->end(), own.begin(), own.end());
    }
    const auto equal = [&](const std::vector<double>& x, int64_t other) {
      return std::equal(&x[other * ss], &x[other * ss] + ss, &x[model * ss]);
    };
    while (!(equal(dynamics, source[model]) && equal(diffusion, source[model]))) source[model]++;
  }
  std::vector<std::vector<double>> transition(size_t(p.models)), variance(transition);
  for (int64_t model = 0; model < p.models; model++)
    if (source[model] == model) transition[model].resize(size_t(p.count * ss)), variance[model] = transition[model];
#pragma omp parallel for num_threads(p.threads) schedule(dynamic)
  for (int64_t model = 0; model < p.models; model++) {
    if (source[model] != model) continue;
    with_size(s, [&](auto of) {
      Discretization<decltype(of)::SIZE> own(&dynamics[model * ss], &diffusion[model * ss], of);
      for (int64_t k = 0; k < p.count; k++)
        own.compute(p.lags[k], &transition[model][k * ss], &variance[model][k * ss]);
    });
  }
#pragma omp parallel for num_threads(p.threads)
  for (int64_t model = 0; model < p.models; model++)
    for (int64_t k = 0; k < p.count; k++)
      for (int64_t i = 0; i < ss; i++) {
        const int64_t at = ((model * p.count + k) * n + members[i / s]) * n + members[i % s];
        p.transition[at] = transition[source[model]][k * ss + i], p.variance[at] = variance[source[model]][k * ss + i];
      }
}

}  // namespace rfa

// 0, or 1 where there is no memory. The caller has filled both results with zeros.
extern "C" int rfa_transitions(const rfa::Lags* p) try {
  for (const auto& members : rfa::joined_states(p->models, p->states, p->dynamics, p->diffusion)) rfa::discretize(*p, members);
  return 0;
} catch (const std::exception&) { return 1; }
