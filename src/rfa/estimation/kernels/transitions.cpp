// Phi and V of the lags of many models.
#include "transitions.h"

extern "C" int64_t rfa_lags_size() { return sizeof(rfa::Lags); }

namespace rfa {

// States that some entry of A or Q joins, in any model. Others move independently of each other.
std::vector<std::vector<int64_t>> joined_states(const Lags& p) {
  const int64_t n = p.states;
  std::vector<int64_t> group(size_t(n), 0);
  for (int64_t i = 0; i < n; i++) group[i] = i;
  for (int64_t at = 0; at < p.models * n * n; at++) {
    const int64_t from = group[at / n % n], to = group[at % n];
    if (from == to || (p.dynamics[at] == 0 && p.diffusion[at] == 0)) continue;
    for (int64_t& one : group) one = one == from ? to : one;
  }
  std::vector<std::vector<int64_t>> found;
  for (int64_t g = 0; g < n; g++) {
    std::vector<int64_t> members;
    for (int64_t i = 0; i < n; i++)
      if (group[i] == g) members.push_back(i);
    if (!members.empty()) found.push_back(members);
  }
  return found;
}

// Phi and V of some states in every model. Models in which A and Q of these states are equal share them.
void discretize(const Lags& p, const std::vector<int64_t>& members) {
  const int64_t n = p.states, s = int64_t(members.size()), ss = s * s;
  std::vector<double> dynamics(size_t(p.models * ss)), diffusion(dynamics.size());
  std::vector<int64_t> source(size_t(p.models), 0);
  for (int64_t model = 0; model < p.models; model++) {
    for (int64_t i = 0; i < ss; i++) {
      const int64_t at = (model * n + members[i / s]) * n + members[i % s];
      dynamics[model * ss + i] = p.dynamics[at], diffusion[model * ss + i] = p.diffusion[at];
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
    Lags own = p;
    own.states = s, own.dynamics = &dynamics[model * ss], own.diffusion = &diffusion[model * ss];
    own.transition = transition[model].data(), own.variance = variance[model].data();
    with_size(s, [&](auto of) { Discretization<decltype(of)::SIZE>(own, of).run(); });
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
  for (const auto& members : rfa::joined_states(*p)) rfa::discretize(*p, members);
  return 0;
} catch (const std::exception&) { return 1; }
