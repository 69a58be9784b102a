// Series in, forecasts out: what engine.py calls.
#include <exception>
#include <memory>

#include "carried.h"

namespace rfa {

// What Python hands over, field by field as in engine.py. Series follow each other in all arrays.
struct Panel {
  int64_t series, probabilities, robust;
  const int64_t *rows, *ahead, *regressors;  // of each series
  const double *period, *times, *values, *x, *ahead_times, *ahead_x;
  const double* normal;                              // (probabilities): quantiles of a standard normal distribution
  double *mean, *quantiles;                          // of each time ahead
  double *fitted, *low, *high, *weights, *one_step;  // of each row
  double* members;             // (series, MEMBERS, 2): weight and rolling error, NaN where it is not used
  double* state;               // what `rfa_updated` goes on from
  const int64_t* state_start;  // (series): where the state of each series has room
  int64_t* state_size;         // (series): how much it takes
  int64_t* status;             // (series): 0, or the kind of failure
};

// Where the results of one series go.
struct Results {
  double *mean, *quantiles, *fitted, *low, *high, *weights, *one_step, *members;
};

struct Engine {
  const Given& g;
  std::vector<int64_t> read;
  bool robust, positive = true;
  Basis basis;
  Origins origins;
  Scaled plain;
  std::unique_ptr<Scaled> logarithmic, adjusted;
  std::vector<Member> members;

  static std::vector<int64_t> rows_read(const Given& g) {
    std::vector<int64_t> rows;
    for (int64_t t = 0; t < g.rows; t++)
      if (!std::isnan(g.values[t])) rows.push_back(t);
    return rows;
  }

  Engine(const Given& given, bool is_robust)
      : g(given),
        read(rows_read(g)),
        robust(is_robust),
        basis(g, read),
        origins(g, read),
        plain(g, read, basis, false) {
    double zeros = 0;
    for (int64_t t : read) positive &= g.values[t] > 0, zeros += g.values[t] == 0;
    robust &= zeros < COUNTS * double(read.size());
    members.reserve(MOST_MEMBERS);
    if (int64_t(read.size()) < FEW_READINGS) {
      join(Family::LEVEL, plain);
      return;
    }
    const std::array<Family, 4> families = {Family::DRIFT, Family::LEVEL, Family::DAMPED, Family::AUTOREGRESSION};
    if (positive) {
      logarithmic = std::make_unique<Scaled>(g, read, basis, true);
      for (Family family : families) join(family, *logarithmic);
      if (!members[0].factors.rows.empty())
        adjusted = std::make_unique<Scaled>(g, read, basis, false, members[0].factors);
    }
    for (Family family : families) join(family, adjusted ? *adjusted : plain);
    if (int64_t(read.size()) < CYCLE_READINGS) return;
    join(Family::CYCLE, adjusted ? *adjusted : plain);
    if (positive && !adjusted) join(Family::CYCLE, *logarithmic);
  }

  void join(Family family, const Scaled& scale) {
    members.emplace_back(g, basis, scale, origins, family, robust);
    members.back().fit();
  }

  // Mean and quantiles of all times, rows and times ahead. Returns what is carried on.
  std::vector<double> write(const Results& out, int64_t probabilities, const double* normal) const {
    std::vector<double> trust(size_t(g.rows), 0.0);
    for (const Member& m : members)
      for (int64_t t = 0; t < g.rows; t++) trust[t] += m.weight[t] / double(members.size());
    Combination all(g, origins, members, trust);
    const size_t leading = size_t(std::max_element(all.weight.begin(), all.weight.end()) - all.weight.begin());
    const Member& leader = members[leading];
    const Smoothed smoothed = smooth(leader);
    all.calibrate(smoothed.weight);
    for (size_t i = 0; i < members.size(); i++) {
      double* to = out.members + 2 * (2 * int(members[i].family) + members[i].scaled.logarithmic);
      to[0] = all.weight[i], to[1] = all.error[i];
    }
    for (int64_t k = 0; k < g.ahead; k++) {
      out.mean[k] = all.ahead(k, 0);
      for (int64_t q = 0; q < probabilities; q++) out.quantiles[k * probabilities + q] = all.ahead(k, normal[q]);
    }
    for (int64_t t = 0; t < g.rows; t++) {
      const double by = leader.scaled.adjusted() ? leader.scaled.factors.rows[t] : 1;
      const double half = BAND_NORMAL * std::sqrt(smoothed.variance[t]);
      out.fitted[t] = by * leader.scaled.back(smoothed.mean[t]);
      out.low[t] = by * leader.scaled.back(smoothed.mean[t] - half),
      out.high[t] = by * leader.scaled.back(smoothed.mean[t] + half);
      out.weights[t] = std::isnan(g.values[t]) ? std::numeric_limits<double>::quiet_NaN() : smoothed.weight[t];
      out.one_step[t] = all.one_step(t);
    }
    Archive archive;
    Carried carried{g.period,     g.times[read.back()], all.widening, basis.season,
                    int(leading), int(g.regressors),    robust,       {}};
    for (size_t i = 0; i < members.size(); i++)
      carried.members.push_back({members[i].points[members[i].best].model, members[i].scaled.logarithmic,
                                 members[i].scaled.adjusted(), all.weight[i], members[i].last.numbers});
    carried.pass(archive);
    return archive.numbers;
  }
};

}  // namespace rfa

extern "C" int64_t rfa_state_room(double period, int64_t regressors) { return rfa::state_room(period, regressors); }

extern "C" void rfa_forecast_panel(const rfa::Panel* panel) {
  const rfa::Panel& p = *panel;
  int64_t row = 0, ahead = 0, x = 0, ahead_x = 0;
  for (int64_t s = 0; s < p.series; s++) {
    const rfa::Given g{p.rows[s],      p.ahead[s], p.regressors[s],       p.period[s],        p.times + row,
                       p.values + row, p.x + x,    p.ahead_times + ahead, p.ahead_x + ahead_x};
    const rfa::Results out{p.mean + ahead,   p.quantiles + ahead * p.probabilities,
                           p.fitted + row,   p.low + row,
                           p.high + row,     p.weights + row,
                           p.one_step + row, p.members + s * 2 * rfa::MEMBERS};
    try {
      const std::vector<double> state = rfa::Engine(g, p.robust).write(out, p.probabilities, p.normal);
      std::copy(state.begin(), state.end(), p.state + p.state_start[s]);
      p.state_size[s] = int64_t(state.size()), p.status[s] = 0;
    } catch (const std::exception&) { p.status[s] = 1; }
    row += g.rows, ahead += g.ahead, x += g.rows * g.regressors, ahead_x += g.ahead * g.regressors;
  }
}

// Of one series. Returns the size of the new state, which replaces the old one, -1 without memory, -2 for no state.
extern "C" int64_t rfa_updated(double* state, int64_t size, const rfa::Panel* panel) {
  const rfa::Panel& p = *panel;
  const rfa::Given g{p.rows[0], p.ahead[0], 0, 0, p.times, p.values, nullptr, p.ahead_times, nullptr};
  try {
    rfa::Archive from{std::vector<double>(state, state + size), 0, true}, to;
    rfa::Carried carried;
    carried.pass(from);
    carried.update(g, p);
    carried.pass(to);
    if (int64_t(to.numbers.size()) > rfa::state_room(carried.period, 0)) return -2;
    std::copy(to.numbers.begin(), to.numbers.end(), state);
    return int64_t(to.numbers.size());
  } catch (const std::bad_alloc&) { return -1; } catch (const std::exception&) { return -2; }
}
