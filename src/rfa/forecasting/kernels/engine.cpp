// Series in, forecasts out: what engine.py calls.
#include <exception>
#include <memory>

#include "carried.h"

namespace rfa {

// What Python hands over, field by field as in engine.py. Series follow each other in all arrays.
struct Panel {
  int64_t series, probabilities, robust;
  const int64_t *rows, *ahead, *regressors;  // of each series
  const double *period, *second, *width, *times, *values, *x, *ahead_times, *ahead_x;
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
  std::vector<std::unique_ptr<Scaled>> scales;  // further ones
  std::vector<Member> members;
  size_t first_free = MOST_MEMBERS;                  // with a free season
  std::array<std::unique_ptr<Profile>, 2> profiles;  // of the linear and of the logarithmic scale

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
    const bool counts = zeros >= COUNTS * double(read.size());
    robust &= !counts, positive &= int64_t(read.size()) >= LOG_READINGS;
    members.reserve(MOST_MEMBERS);
    if (counts || int64_t(read.size()) < FEW_READINGS) {
      join(Family::LEVEL, plain);
      return;
    }
    const std::array<Family, 4> families = {Family::DRIFT, Family::LEVEL, Family::DAMPED, Family::AUTOREGRESSION};
    const Scaled *linear = &plain, *logarithmic = positive ? &scale(true) : nullptr;
    if (positive)
      for (Family family : families) join(family, *logarithmic);
    const bool seasonal = positive && members[0].season.usable();
    if (seasonal) linear = &scale(false, members[0].season);
    for (Family family : families) join(family, *linear);
    const Member& damped = members[members.size() - 2];
    if (int64_t(read.size()) >= CYCLE_READINGS) {
      join(Family::CYCLE, *linear);
      if (positive && !seasonal) join(Family::CYCLE, *logarithmic);
    }
    if (!on_grid()) return;
    if (!positive && members[0].season.usable()) linear = &scale(false, members[0].season);
    if (int64_t(read.size()) >= LAGS_READINGS) {
      join_lags(*linear, damped);
      if (positive) join_lags(seasonal ? scale(true, members[0].season) : *logarithmic, damped);
    }
    const double span = g.times[origins.last] - g.times[read[0]];
    if (g.period > MOST_BINS || span < SEASON_SPAN * g.period || std::max(g.period, further()) <= 2 * MOST_WAVES)
      return;
    first_free = members.size();
    for (bool is_log : {true, false}) {
      if (is_log && !positive) continue;
      Season season = free_season(is_log ? *logarithmic : plain);
      if (!season.usable()) continue;
      const Scaled& free = scale(is_log, std::move(season));
      for (Family family : {Family::LEVEL, Family::DAMPED}) join(family, free);
      join_lags(free, members.back());
    }
  }

  double further() const { return g.second >= 2 && g.second <= MOST_BINS ? g.second : 0; }

  const Scaled& scale(bool is_logarithmic, Season known = {}) {
    scales.push_back(std::make_unique<Scaled>(g, read, basis, is_logarithmic, std::move(known)));
    return *scales.back();
  }

  // Whether all times are whole numbers of steps apart, and most steps have a reading.
  bool on_grid() const {
    auto whole = [&](double time) { return std::abs(time - g.times[0] - std::round(time - g.times[0])) < 1e-6; };
    return std::all_of(g.times, g.times + g.rows, whole) &&
           std::all_of(g.ahead_times, g.ahead_times + g.ahead, whole) &&
           g.ahead_times[g.ahead - 1] - g.times[origins.last] < MOST_PATH && !g.regressors && read[0] == 0 &&
           g.times[origins.last] - g.times[0] < GRID_ROWS * double(read.size());
  }

  void join_lags(const Scaled& scale, const Member& filter) {
    for (Family family : {Family::LAGS, Family::CHANGES}) {
      members.emplace_back(g, basis, scale, origins, family, robust);
      members.back().fit_lags(filter);
    }
  }

  // The free season with the gain, and of the periods, that has the least error.
  Season free_season(const Scaled& scale) {
    Season best;
    double least = std::numeric_limits<double>::infinity();
    const int64_t known_until = origins.at.empty() ? origins.last : origins.at[0];
    for (double gain : PROFILE_GAINS)
      for (const auto& [period, second] : {std::pair(g.period, 0.0), {g.period, further()}, {further(), 0.0}}) {
        if (!(period >= 2)) continue;
        Profile profile(period, second, gain, scale.level, scale.slope);
        auto value = [&](double time) { return profile.season(time, scale.logarithmic); };
        Season season;
        season.added = !scale.logarithmic, season.rows.assign(size_t(g.rows), 0);
        double error = 0;
        for (int64_t t = 0, origin = 0; t < g.rows; t++) {
          season.rows[t] = value(g.times[t]);
          if (std::isnan(scale.y[t])) continue;
          error += profile.join(g.times[t], scale.y[t]);
          if (t == known_until)
            for (int64_t i = 0; i <= t; i++) season.rows[i] = value(g.times[i]);
          if (origin >= int64_t(origins.at.size()) || origins.at[origin] != t) continue;
          for (int64_t target : origins.targets[origin]) season.rolling.push_back(value(g.times[target]));
          origin++;
        }
        for (int64_t k = 0; k < g.ahead; k++) season.ahead.push_back(value(g.ahead_times[k]));
        if (error < least) {
          least = error, best = season;
          profiles[scale.logarithmic] = std::make_unique<Profile>(profile);
        }
      }
    return best;
  }

  void join(Family family, const Scaled& scale) {
    members.emplace_back(g, basis, scale, origins, family, robust);
    members.back().fit();
  }

  // Mean and quantiles of all times, rows and times ahead. Returns what is carried on.
  std::vector<double> write(const Results& out, int64_t probabilities, const double* normal, double width) const {
    std::vector<double> trust(size_t(g.rows), 0.0);
    for (const Member& m : members)
      for (int64_t t = 0; t < g.rows; t++) trust[t] += m.weight[t] / double(members.size());
    Combination all(g, origins, members, trust);
    size_t leading = 0;  // the filter that has the largest weight
    for (size_t i = 1; i < members.size(); i++)
      if (members[i].is_filter() && all.weight[i] > all.weight[leading]) leading = i;
    const Member& leader = members[leading];
    const Smoothed smoothed = smooth(leader);
    all.calibrate(smoothed.weight), all.widening *= width;
    for (size_t i = 0; i < members.size(); i++) {
      const bool free = members[i].scaled.adjusted() && i >= first_free;
      double* to = out.members + 2 * (14 * free + 2 * int(members[i].family) + members[i].scaled.logarithmic);
      to[0] = all.weight[i], to[1] = all.error[i];
    }
    for (int64_t k = 0; k < g.ahead; k++) {
      out.mean[k] = all.ahead(k, 0);
      for (int64_t q = 0; q < probabilities; q++) out.quantiles[k * probabilities + q] = all.ahead(k, normal[q]);
    }
    for (int64_t t = 0; t < g.rows; t++) {
      const double half = BAND_NORMAL * std::sqrt(smoothed.variance[t]);
      out.fitted[t] = leader.scaled.row(smoothed.mean[t], t);
      out.low[t] = leader.scaled.row(smoothed.mean[t] - half, t),
      out.high[t] = leader.scaled.row(smoothed.mean[t] + half, t);
      out.weights[t] = std::isnan(g.values[t]) ? std::numeric_limits<double>::quiet_NaN() : smoothed.weight[t];
      out.one_step[t] = all.one_step(t);
    }
    Archive archive;
    Carried carried{
        g.period, g.second, g.times[read.back()], all.widening, basis.season, int(leading), int(g.regressors), robust,
        {},       {}};
    for (int i = 0; i < 2; i++)
      if (profiles[i]) carried.profiles[i] = *profiles[i];
    for (size_t i = 0; i < members.size(); i++) {
      const Member& m = members[i];
      const Adjusted adjusted = !m.scaled.adjusted() ? Adjusted::NOT
                                : i < first_free     ? Adjusted::FIRST
                                                     : Adjusted::FREE;
      const Model model = m.is_filter() ? m.points[m.best].model : Model();
      carried.members.push_back({model, m.scaled.logarithmic, !m.is_filter(), adjusted, all.weight[i], m.last.numbers});
    }
    carried.pass(archive);
    return archive.numbers;
  }
};

}  // namespace rfa

extern "C" int64_t rfa_state_room(double period, double second, int64_t regressors) {
  return rfa::state_room(period, second, regressors);
}

extern "C" void rfa_forecast_panel(const rfa::Panel* panel) {
  const rfa::Panel& p = *panel;
  int64_t row = 0, ahead = 0, x = 0, ahead_x = 0;
  for (int64_t s = 0; s < p.series; s++) {
    const rfa::Given g{p.rows[s],     p.ahead[s],     p.regressors[s], p.period[s],           p.second[s],
                       p.times + row, p.values + row, p.x + x,         p.ahead_times + ahead, p.ahead_x + ahead_x};
    const rfa::Results out{p.mean + ahead,   p.quantiles + ahead * p.probabilities,
                           p.fitted + row,   p.low + row,
                           p.high + row,     p.weights + row,
                           p.one_step + row, p.members + s * 2 * rfa::MEMBERS};
    try {
      const std::vector<double> state = rfa::Engine(g, p.robust).write(out, p.probabilities, p.normal, p.width[s]);
      std::copy(state.begin(), state.end(), p.state + p.state_start[s]);
      p.state_size[s] = int64_t(state.size()), p.status[s] = 0;
    } catch (const std::exception&) { p.status[s] = 1; }
    row += g.rows, ahead += g.ahead, x += g.rows * g.regressors, ahead_x += g.ahead * g.regressors;
  }
}

// Of one series. Returns the size of the new state, which replaces the old one, -1 without memory, -2 for no state.
extern "C" int64_t rfa_updated(double* state, int64_t size, const rfa::Panel* panel) {
  const rfa::Panel& p = *panel;
  const rfa::Given g{p.rows[0], p.ahead[0], 0, 0, 0, p.times, p.values, nullptr, p.ahead_times, nullptr};
  try {
    rfa::Archive from{std::vector<double>(state, state + size), 0, true}, to;
    rfa::Carried carried;
    carried.pass(from);
    carried.update(g, p);
    carried.pass(to);
    if (int64_t(to.numbers.size()) > rfa::state_room(carried.period, carried.second, 0)) return -2;
    std::copy(to.numbers.begin(), to.numbers.end(), state);
    return int64_t(to.numbers.size());
  } catch (const std::bad_alloc&) { return -1; } catch (const std::exception&) {
    return -2;
  }
}
