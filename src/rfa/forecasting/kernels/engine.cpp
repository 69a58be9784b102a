// Series in, forecasts out: what engine.py calls.
#include <exception>

#include "combine.h"

namespace rfa {

// What Python hands over, field by field as in engine.py. Series follow each other in all arrays.
struct Panel {
  int64_t series, probabilities, robust;
  const int64_t *rows, *ahead, *regressors;  // of each series
  const double *period, *times, *values, *x, *ahead_times, *ahead_x;
  const double *normal;       // (probabilities): quantiles of a standard normal distribution
  double *mean, *quantiles;   // of each time ahead
  double *fitted, *low, *high, *weights, *one_step;  // of each row
  double *members;            // (series, MEMBERS, 2): weight and rolling error, NaN where it is not used
  int64_t *status;            // (series): 0, or the kind of failure
};

#ifdef RFA_DEV
static double* dev; static int64_t dev_at;
extern "C" void set_dev(double* d) { dev = d, dev_at = 0; }
#endif
struct Target { double *mean, *quantiles, *fitted, *low, *high, *weights, *one_step, *members; };

void forecast_series(const Panel& panel, const Given& g, const Target& out) {
  std::vector<int64_t> read;
  bool positive = true;
  for (int64_t t = 0; t < g.rows; t++)
    if (!std::isnan(g.values[t])) read.push_back(t), positive &= g.values[t] > 0;
  const Basis basis(g, read);
  const Origins origins(g, read);
  const Scaled plain(g, read, false);
  std::unique_ptr<Scaled> logarithmic, adjusted;
  std::vector<Member> members;
  members.reserve(MOST_MEMBERS);
  const std::array<Family, 4> families = {Family::DRIFT, Family::LEVEL, Family::DAMPED, Family::AUTOREGRESSION};
  auto join = [&](Family family, const Scaled& scale) {
    if (members.size() && !(MASK >> (2 * int(family) + scale.logarithmic) & 1) && !(family == Family::DRIFT && scale.logarithmic)) return;
    members.emplace_back(g, basis, scale, origins, family, bool(panel.robust));
    members.back().fit();
  };
  if (positive) {
    logarithmic = std::make_unique<Scaled>(g, read, true);
    for (Family family : families) join(family, *logarithmic);
    Factors factors;
    if (members[0].points[members[0].best].model.season) factors = members[0].factors;
    if (!factors.rows.empty()) adjusted = std::make_unique<Scaled>(g, read, false, std::move(factors));
  }
  for (Family family : families) join(family, adjusted ? *adjusted : plain);
  std::vector<double> trust(size_t(g.rows), 1.0);
  for (int64_t t = 0; t < g.rows; t++) {
    double sum = 0;
    for (Member& m : members) sum += m.weight[t] / double(members.size());
    trust[t] = std::isnan(g.values[t]) ? 0 : sum;
  }
  const Combination all(g, origins, members, trust);
  for (size_t i = 0; i < members.size(); i++) {
    double* to = out.members + 2 * (2 * int(members[i].family) + members[i].scaled.logarithmic);
    to[0] = all.weight[i], to[1] = all.error[i];
#ifdef RFA_DEV
    for (int64_t k = 0; k < g.ahead; k++) {
      double* d = dev + (dev_at + k) * 16 + 2 * int(members[i].family) + members[i].scaled.logarithmic;
      d[0] = members[i].scaled.back(members[i].ahead[k].mean) * (members[i].scaled.adjusted() ? members[i].scaled.factors.ahead[k] : 1);
      d[8] = std::sqrt(members[i].ahead[k].variance);
    }
#endif
  }
  for (int64_t k = 0; k < g.ahead; k++) {
    out.mean[k] = all.quantile(k, 0);
    for (int64_t q = 0; q < panel.probabilities; q++) out.quantiles[k * panel.probabilities + q] = all.quantile(k, panel.normal[q]);
  }
  for (int64_t t = 0; t < g.rows; t++) {
    out.weights[t] = trust[t];
    out.one_step[t] = all.value([t](const Member& m) { return Forecast{m.one_step[t], 0}; }, [t](const Factors& f) { return f.rows[t]; }, 0);
  }
}

}  // namespace rfa

extern "C" void rfa_forecast_panel(const rfa::Panel* panel) {
  const rfa::Panel& p = *panel;
  int64_t row = 0, ahead = 0, x = 0, ahead_x = 0;
  for (int64_t s = 0; s < p.series; s++) {
    const rfa::Given g{p.rows[s], p.ahead[s], p.regressors[s], p.period[s], p.times + row, p.values + row, p.x + x, p.ahead_times + ahead, p.ahead_x + ahead_x};
    const rfa::Target out{p.mean + ahead, p.quantiles + ahead * p.probabilities, p.fitted + row, p.low + row, p.high + row, p.weights + row, p.one_step + row, p.members + s * 16};
    try {
      rfa::forecast_series(p, g, out);
      p.status[s] = 0;
    } catch (const std::exception&) {
      p.status[s] = 1;
    }
#ifdef RFA_DEV
    rfa::dev_at += g.ahead;
#endif
    row += g.rows, ahead += g.ahead, x += g.rows * g.regressors, ahead_x += g.ahead * g.regressors;
  }
}
