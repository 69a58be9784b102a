// The entry points of the forward pass and of what comes before it.
#include "forward.h"
#include "phases.h"
#include "run.h"

extern "C" {
int64_t rfa_problem_size() { return sizeof(rfa::Problem); }
int rfa_forward(const rfa::Problem* p) { return rfa::run<rfa::Forward>(*p); }
int rfa_phases(const rfa::PhasesProblem* p) {
  return rfa::run_tasks(p->batch * p->heads, p->threads, [&](int64_t index) { rfa::head_phases(*p, index); });
}
}
