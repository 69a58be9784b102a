// The filter of a linear model with sensors, as linear_model.py has it: a row when it comes, many series at once, and
// smoothed. What it knows of a series is one array of numbers, the same in all three.
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <unordered_map>

#include "robust.h"
#include "transitions.h"

namespace rfa {

// Python keeps the arrays for as long as the filter.
struct LinearModel {
  int64_t states, inputs, sensors, robust, by_component, discrete;
  double step;                                 // of a discrete model
  const int64_t* sizes;                        // (sensors,): components of each
  const double *dynamics, *diffusion, *input;  // A or F, Q (n, n), B (n, inputs)
  const double* observation;                   // (M, n): the rows C of all sensors
  const double* noise;                         // R of each sensor, one after another
  const void* constants;                       // RobustConstants
};

// Rows of some series. Without sensors a row has the M components of all, else those of one, in the first places.
struct LinearRows {
  int64_t series, length, width, parts, threads, smooth;
  int64_t time_stride, input_stride;  // 0 where all series have the same
  const double *times, *readings, *input;            // (length,), (series, length, width), (length, inputs)
  const int64_t* sensor;                             // (length,) or none: of all series
  const double *observation, *noise;                 // or none: (series, length, width, n or width), C and R of each row
  double* state;                                     // (series, state_size): before the first row, then after the last
  double *mean, *covariance;                         // (series, length, n), (series, length, n, n)
  double *weight, *spread;                           // (series, length, parts)
  double *predicted, *variance, *log_density;        // (series, length, width), the same, (series, length)
  int64_t* fault;                                    // (series, 2): what is wrong, and in which row
};

enum Fault : int64_t { NO_FAULT, LATE, NO_STEPS, INFINITE, OVERFLOWS };
constexpr double LOG_TWO_PI = 1.8378770664093454836, NO_NUMBER = std::numeric_limits<double>::quiet_NaN();
constexpr double ROUGH_STEP = 1e-3;  // of a step: times in float64 are rounded
constexpr int REMEMBERED = 64;       // gaps whose transitions are kept

// A reading in units of its noise: fourth powers of larger ones overflow, or squares in the Kalman filter.
constexpr double LARGEST_VALUE = 1e70;
inline double bounded(double value, int64_t robust) {
  const double largest = robust ? LARGEST_VALUE : 1e150;
  return std::min(std::max(value, -largest), largest);
}

inline std::vector<double> numbers(int64_t count, double value = 0) { return std::vector<double>(size_t(count), value); }

// Phi and V of a gap, and what an input adds over it.
struct Gap {
  double gap = NO_NUMBER;
  std::vector<double> transition, variance, input;
};

// Those of [x, u] with A = [[A, B], [0, 0]], by blocks of joined states.
struct Gaps {
  const LinearModel& model;
  const int64_t n, size;
  std::vector<double> dynamics, diffusion;
  std::vector<std::vector<int64_t>> blocks;
  std::vector<std::function<void(double, double*, double*)>> of_blocks;
  std::vector<Gap> entries;

  explicit Gaps(const LinearModel& given)
      : model(given), n(given.states), size(n + given.inputs), dynamics(size_t(size * size)),
        diffusion(dynamics.size()), entries(REMEMBERED) {
    for (int64_t i = 0; i < n; i++) {
      std::copy(model.dynamics + i * n, model.dynamics + (i + 1) * n, &dynamics[i * size]);
      std::copy(model.diffusion + i * n, model.diffusion + (i + 1) * n, &diffusion[i * size]);
      for (int64_t j = n; j < size; j++) dynamics[i * size + j] = model.input[i * model.inputs + j - n];
    }
    for (int64_t i = n; i < size; i++) dynamics[i * size + i] = double(model.discrete);
    if (model.discrete) return;
    blocks = joined_states(1, size, dynamics.data(), diffusion.data());
    for (const auto& block : blocks) {
      const int64_t s = int64_t(block.size());
      const auto own = selected(dynamics.data(), size, block), noise = selected(diffusion.data(), size, block);
      with_size(s, [&](auto of) {
        Discretization<decltype(of)::SIZE> found(own.data(), noise.data(), of);
        of_blocks.emplace_back([found](double gap, double* phi, double* v) mutable { found.compute(gap, phi, v); });
      });
    }
  }

  // None where a gap is no whole number of steps.
  const Gap* at(double gap) {
    if (model.discrete) {
      const double count = std::round(gap / model.step);
      if (!(std::abs(gap / model.step - count) < ROUGH_STEP)) return nullptr;
      gap = count;
    }
    uint64_t bits;
    std::memcpy(&bits, &gap, 8);
    Gap& entry = entries[bits * 0x9E3779B97F4A7C15u >> 58];
    if (entry.gap == gap) return &entry;
    std::vector<double> phi(dynamics.size()), v(dynamics.size());
    if (model.discrete) power(gap, phi, v);
    for (size_t b = 0; b < blocks.size(); b++) {
      const int64_t s = int64_t(blocks[b].size());
      std::vector<double> own(size_t(s * s)), gained(own.size());
      of_blocks[b](gap, own.data(), gained.data());
      for (int64_t i = 0; i < s * s; i++) {
        const int64_t at = blocks[b][i / s] * size + blocks[b][i % s];
        phi[at] = own[i], v[at] = gained[i];
      }
    }
    entry.transition.resize(size_t(n * n)), entry.variance.resize(size_t(n * n));
    entry.input.resize(size_t(n * model.inputs));
    for (int64_t i = 0; i < n; i++) {
      std::copy(&phi[i * size], &phi[i * size + n], &entry.transition[i * n]);
      std::copy(&v[i * size], &v[i * size + n], &entry.variance[i * n]);
      std::copy(phi.data() + i * size + n, phi.data() + (i + 1) * size, entry.input.data() + i * model.inputs);
    }
    entry.gap = gap;
    return &entry;
  }

  // F^count, and the noise of so many steps.
  void power(double count, std::vector<double>& phi, std::vector<double>& v) const {
    const Matrices<0> all(size);
    std::vector<double> base = dynamics, noise = diffusion, work(base.size()), next(base.size());
    for (int64_t i = 0; i < size; i++) phi[i * size + i] = 1;
    for (; count > 0; count = std::floor(count / 2)) {
      if (std::fmod(count, 2) == 1) {  // so many steps more
        all.sandwich(base.data(), v.data(), work.data());
        for (size_t i = 0; i < v.size(); i++) v[i] += noise[i];
        all.multiply(base.data(), phi.data(), work.data()), phi.swap(work);
      }
      next = noise;
      all.sandwich(base.data(), next.data(), work.data());
      for (size_t i = 0; i < noise.size(); i++) noise[i] += next[i];
      all.multiply(base.data(), base.data(), work.data()), base.swap(work);
    }
  }
};

struct LinearOutput {
  double *mean, *covariance, *weight, *spread, *predicted, *variance, *log_density;
};

struct LinearBase {
  const LinearModel& model;
  const int64_t n;
  const RobustConstants& constants;
  std::vector<int64_t> begin, noise_begin;   // of each sensor in C, and in R
  std::vector<std::vector<double>> full;     // L^-1 C of each sensor, all components there
  std::vector<std::vector<double>> factors;  // L
  std::vector<double> full_logs;             // log |L|
  const double *own_observation = nullptr, *own_noise = nullptr;  // of a row, in the place of the model's

  explicit LinearBase(const LinearModel& given)
      : model(given), n(given.states), constants(*static_cast<const RobustConstants*>(given.constants)) {}
  virtual ~LinearBase() = default;
  virtual void start(const double* mean, const double* covariance, const double* units, double* state) = 0;
  virtual Fault use(double* state, double time, const double* reading, int64_t sensor, const double* input,
                    const LinearOutput& out) = 0;
  virtual const Gap* at(double gap) = 0;
  virtual void run(const LinearRows& rows, int64_t first, int64_t series) = 0;  // some, at most LANES; or one
  virtual std::unique_ptr<LinearBase> another() const = 0;

  const double* observation(int64_t s) const { return own_observation ? own_observation : model.observation + begin[s] * n; }
  const double* noise(int64_t s) const { return own_noise ? own_noise : model.noise + noise_begin[s]; }
  int64_t channels() const {
    return model.by_component ? std::accumulate(model.sizes, model.sizes + model.sensors, int64_t(0)) : model.sensors;
  }
  // The numbers of a series: what RobustFilter carries, diffuse directions of filter and challenger, then two more.
  int64_t carried_size() const { return rfa::carried_size(n, channels()); }
  int64_t state_size() const { return carried_size() + 2 * (2 * n * n + 1) + 2; }

  // Whether a state has no diffuse direction and no challenger.
  bool ordinary(const double* state) const {
    const int64_t carried = carried_size();
    return !(state[carried - 1] > NONE) && state[carried + 2 * n * n] == 0 && state[state_size() - 2] == 0;
  }

  int64_t sensor_of(const LinearRows& r, int64_t k) const { return r.sensor ? r.sensor[k] : -1; }
  const double* input_of(const LinearRows& r, int64_t series, int64_t k) const {
    return r.input ? r.input + series * r.input_stride + k * model.inputs : nullptr;
  }

  // Where what is found in a row goes: all NaN where a sensor may have fewer components than the row.
  LinearOutput output(const LinearRows& r, int64_t at) const {
    const LinearOutput out{r.mean + at * n, r.covariance + at * n * n, r.weight + at * r.parts, r.spread + at * r.parts,
                           r.predicted + at * r.width, r.variance + at * r.width, r.log_density + at};
    for (double* one : {out.weight, out.spread}) std::fill(one, one + r.parts * !!r.sensor, NO_NUMBER);
    for (double* one : {out.predicted, out.variance}) std::fill(one, one + r.width * !!r.sensor, NO_NUMBER);
    return out;
  }
};

}  // namespace rfa

#include "lanes.h"

namespace rfa {

template <int N> struct LinearFilter : LinearBase {
  const int64_t m;  // of the largest sensor, or 1 where each component has its own weight
  const Matrices<N> of;
  std::vector<double> rows, values, before, before_covariance, factor, scratch;
  int64_t channel = 0;
  Problem problem;
  RobustFilter<N> filter;
  Gaps gaps;
  double time = NO_NUMBER, log_units = 0;
  LaneFilter<N == 4 ? 4 : 0> lanes;

  LinearFilter(const LinearModel& given, Matrices<N> states)
      : LinearBase(given), m(largest(given)), of(states), rows(size_t(m * n)), values(size_t(m)),
        before(size_t(n)), before_covariance(size_t(n * n)), problem(one_row()),
        filter(problem, Covariance<N>(of, before_covariance.data()), before, {channels(), &channel}, !given.robust),
        gaps(given), lanes(*this) {
    int64_t at = 0, noise_at = 0, most = 0;
    for (int64_t s = 0; s < model.sensors; s++) {
      const int64_t size = model.sizes[s];
      begin.push_back(at), noise_begin.push_back(noise_at);
      at += size, noise_at += size * size, most = std::max(most, size);
      scratch.resize(size_t(std::max<int64_t>(most * n, scratch.size())));
      full.emplace_back(size_t(size * n)), factors.emplace_back(size_t(size * size));
      std::copy(noise(s), noise(s) + size * size, factors[s].begin());
      std::copy(observation(s), observation(s) + size * n, full[s].begin());
      full_logs.push_back(whiten(size, factors[s].data(), full[s].data()));
    }
    factor.resize(size_t(most * most));
  }

  static int64_t largest(const LinearModel& given) {
    return given.by_component ? 1 : *std::max_element(given.sizes, given.sizes + given.sensors);
  }

  void set_own(const LinearRows& r, int64_t at) {
    if (!r.observation) return;
    problem.predicted_mean = before.data(), problem.predicted_covariance = before_covariance.data();
    own_observation = r.observation + at * r.width * n, own_noise = r.noise + at * r.width * r.width;
  }

  Problem one_row() {
    Problem p{};
    p.length = 1, p.components = m, p.states = n, p.rows = rows.data(), p.values = values.data();
    p.constants = model.constants;
    return p;
  }

  // R to its factor L, and C to L^-1 C. Returns log |L|.
  double whiten(int64_t size, double* factor, double* c) const {
    double logs = 0;
    if (!Matrices<0>(size).cholesky(factor)) return NO_NUMBER;
    for (int64_t i = 0; i < size; i++) {
      for (int64_t k = 0; k < i; k++)
        for (int64_t j = 0; j < n && factor[i * size + k] != 0; j++) c[i * n + j] -= factor[i * size + k] * c[k * n + j];
      for (int64_t j = 0; j < n; j++) c[i * n + j] /= factor[i * size + i];
      logs += std::log(factor[i * size + i]);
    }
    return logs;
  }

  // The row of a reading of sensor s, NaN where a component is missing, in units of its noise. Returns log |L|.
  double set_row(int64_t s, const double* z) {
    const int64_t size = model.sizes[s];
    bool complete = true;
    for (int64_t i = 0; i < size; i++) complete &= z[i] == z[i];
    const double *l = factors[s].data(), *c = full[s].data();
    double logs = full_logs[s];
    if (!complete || own_noise) {  // a missing component has a row of zeros, and noise of its own
      std::copy(noise(s), noise(s) + size * size, factor.begin());
      std::copy(observation(s), observation(s) + size * n, scratch.begin());
      for (int64_t i = 0; i < size; i++) {
        if (z[i] == z[i]) continue;
        std::fill(&scratch[i * n], &scratch[i * n] + n, 0.0);
        for (int64_t k = 0; k < size; k++) factor[i * size + k] = factor[k * size + i] = k == i;
      }
      logs = whiten(size, factor.data(), scratch.data()), l = factor.data(), c = scratch.data();
    }
    std::copy(c, c + size * n, rows.begin()), std::fill(rows.begin() + size * n, rows.end(), 0.0);
    std::fill(values.begin(), values.end(), 0.0);
    for (int64_t i = 0; i < size; i++) {
      double sum = z[i] == z[i] ? z[i] : 0;
      for (int64_t k = 0; k < i; k++) sum -= l[i * size + k] * values[k];
      values[i] = bounded(sum / l[i * size + i], model.robust);
    }
    return logs;
  }

  // The same of component i alone, whose noise is independent.
  double set_component(int64_t s, int64_t i, double z) {
    const double deviation = std::sqrt(noise(s)[i * (model.sizes[s] + 1)]);
    for (int64_t j = 0; j < n; j++) rows[j] = z == z ? observation(s)[i * n + j] / deviation : 0;
    values[0] = z == z ? bounded(z / deviation, model.robust) : 0;
    return z == z ? std::log(deviation) : 0;
  }

  void load(const double* from) {
    filter.resume(from), from += filter.carried_size();
    for (auto* one : {&filter.filter, &filter.challenger}) {
      Covariance<N>& s = one->state;
      s.remaining = from[2 * n * n], s.diffuse = s.remaining > 0;
      if (s.diffuse) s.root.assign(from, from + n * n), s.origin.assign(from + n * n, from + 2 * n * n);
      from += 2 * n * n + 1;
    }
    log_units = from[0], time = from[1];
  }

  void save(double* to, bool whole = false) const {
    filter.carry(to, whole), to += filter.carried_size();
    for (const auto* one : {&filter.filter, &filter.challenger}) {
      const Covariance<N>& s = one->state;
      if (s.diffuse) std::copy(s.root.begin(), s.root.end(), to), std::copy(s.origin.begin(), s.origin.end(), to + n * n);
      to[2 * n * n] = s.diffuse ? s.remaining : 0;
      to += 2 * n * n + 1;
    }
    to[0] = log_units, to[1] = time;
  }

  // Of a mean and covariance, or diffuse with a unit for each state.
  void start(const double* mean, const double* covariance, const double* units, double* state) override {
    auto& one = filter.filter;
    one.mean.assign(mean, mean + n), one.state = Covariance<N>(of, covariance);
    one.scales.assign(one.scales.size(), NoiseScale<double>(filter.constants));
    log_units = 0, time = NO_NUMBER;
    if (units) one.state.set_diffuse({units, units + n});
    for (int64_t i = 0; units && i < n; i++) log_units += std::log(units[i]);
    filter.challenger = one, filter.log_odds = NONE, filter.trusted = 0;
    save(state, true);
  }

  Fault predict(double next, const double* input) {
    const double gap = std::isnan(time) ? 0 : next - time;
    if (!(gap >= 0)) return LATE;
    time = next;
    if (gap == 0) return NO_FAULT;
    const auto* entry = gaps.at(gap);
    if (!entry) return NO_STEPS;
    filter.predict(filter.filter, entry->transition.data(), entry->variance.data());
    add(filter.filter.mean.data(), *entry, input);
    if (filter.log_odds > NONE) {
      filter.predict(filter.challenger, entry->transition.data(), entry->variance.data());
      add(filter.challenger.mean.data(), *entry, input);
    }
    return filter.steps.finite(filter.filter.state.p.data()) ? NO_FAULT : OVERFLOWS;
  }

  void add(double* mean, const Gap& entry, const double* input) const {
    for (int64_t i = 0; input && i < n; i++)
      for (int64_t j = 0; j < model.inputs; j++) mean[i] += entry.input[i * model.inputs + j] * input[j];
  }

  // What is expected of component i of sensor s by a mean and a covariance, and its variance.
  void expect(int64_t s, int64_t i, const double* mean, const double* p, double* predicted, double* variance) {
    const double* c = observation(s) + i * n;
    const auto& one = filter.filter;
    *predicted = of.dot(c, mean);
    of.apply_transposed(p, c, filter.x.data());
    // states far more uncertain than their sum leave it a negative variance by rounding
    double sum = noise(s)[i * (model.sizes[s] + 1)] + std::max(of.dot(c, filter.x.data()), 0.0);
    if (one.state.diffuse) {
      double shown = 0, most = 0;
      of.apply_transposed(one.state.root.data(), c, filter.x.data());
      for (int64_t j = 0; j < n; j++) most += std::abs(c[j]) * filter.steps.deviation(one.state, int(j));
      shown = of.dot(filter.x.data(), filter.x.data());
      if (shown > NO_PART * most * (NO_PART * most)) sum = std::numeric_limits<double>::infinity();
    }
    *variance = sum;
  }

  // One part of a row, which is set.
  void use_part(double logs, bool seen, double* weight, double* spread, double& log_density) {
    filter.use(0);
    *weight = seen ? filter.filter.row.weight : NO_NUMBER, *spread = filter.filter.row.mean_variance;
    if (!seen) return;
    log_density += filter.log_density - logs;
    if (log_units != 0 && !filter.filter.state.diffuse) log_density += log_units, log_units = 0;
  }

  // A row at `next`. The state is that before the row where something is wrong.
  Fault use(double* state, double next, const double* z, int64_t sensor, const double* input,
            const LinearOutput& out) override {
    load(state);
    const Fault fault = row(next, z, sensor, input, out);
    if (!fault) save(state);
    return fault;
  }

  Fault row(double next, const double* z, int64_t sensor, const double* input, const LinearOutput& out) {
    const int64_t first = std::max<int64_t>(sensor, 0), last = sensor < 0 ? model.sensors : sensor + 1;
    int64_t width = 0, part = 0;
    for (int64_t s = first; s < last; s++)
      for (int64_t i = 0; i < model.sizes[s]; i++, width++)
        if (std::isinf(z[width])) return INFINITE;
    const Fault fault = predict(next, input);
    if (fault) return fault;
    double log_density = 0;
    int64_t at = 0, seen = 0;
    for (int64_t s = first; s < last; s++) {
      const int64_t size = model.sizes[s];
      bool any = false;
      for (int64_t i = 0; i < size; i++) {
        const bool here = z[at + i] == z[at + i];
        any |= here, seen += here;
        const auto& one = filter.filter;
        expect(s, i, one.mean.data(), one.state.p.data(), out.predicted + at + i, out.variance + at + i);
        if (!model.by_component) continue;
        channel = begin[s] + i;
        const double logs = set_component(s, i, z[at + i]);
        use_part(logs, here, out.weight + part, out.spread + part, log_density), part++;
      }
      if (!model.by_component) {
        channel = s;
        if (any) use_part(set_row(s, z + at), true, out.weight + part, out.spread + part, log_density);
        else out.weight[part] = NO_NUMBER, out.spread[part] = 0;
        for (int64_t i = 0; any && own_noise && i < size; i++)  // where the challenger takes over, by it
          expect(s, i, before.data(), before_covariance.data(), out.predicted + at + i, out.variance + at + i);
        part++;
      }
      at += size;
    }
    *out.log_density = log_density - double(seen) * LOG_TWO_PI / 2;
    std::copy(filter.filter.mean.begin(), filter.filter.mean.end(), out.mean);
    filter.steps.write(filter.filter.state, out.covariance);
    return NO_FAULT;
  }

  const Gap* at(double gap) override { return gaps.at(gap); }

  void run(const LinearRows& r, int64_t first, int64_t series) override {
    if (series > 1) return lanes.run(r, first, series);
    double* state = r.state + first * state_size();
    load(state);
    if (r.smooth) return smooth(r, first);
    for (int64_t k = 0; k < r.length; k++) {
      const int64_t at = first * r.length + k;
      set_own(r, at);
      const Fault fault = row(r.times[first * r.time_stride + k], r.readings + at * r.width, sensor_of(r, k),
                              input_of(r, first, k), output(r, at));
      if (fault) {
        r.fault[2 * first] = fault, r.fault[2 * first + 1] = k;
        return;
      }
    }
    save(state);
  }

  // Mean, covariance and weight of each row by all rows, from a start. Inputs move the states along a known path, which
  // is taken off the readings before and added after.
  void smooth(const LinearRows& r, int64_t series) {
    const int64_t parts = r.parts, length = r.length, total = length * parts;
    auto row_table = numbers(total * m * n), value_table = numbers(total * m), path = numbers(n), moved = numbers(n);
    auto paths = numbers(length * n), transition = numbers(n * n), variance = numbers(n * n);
    std::vector<int64_t> lag_index(value_table.size()), channel_of(value_table.size());
    std::unordered_map<double, int64_t> known;
    for (int64_t i = 0; i < n; i++) transition[i * n + i] = 1;
    const auto fail = [&](int64_t fault, int64_t row) { r.fault[2 * series] = fault, r.fault[2 * series + 1] = row; };
    if (const Fault fault = predict(r.times[series * r.time_stride], input_of(r, series, 0))) return fail(fault, 0);
    const Candidate<N> first = filter.filter;
    for (int64_t k = 0; k < length; k++) {
      const double now = r.times[series * r.time_stride + k], gap = now - time;
      time = now;
      if (k && gap > 0) {
        const auto [place, is_new] = known.try_emplace(gap, int64_t(known.size()) + 1);
        const auto* entry = gaps.at(gap);
        if (!entry) return fail(NO_STEPS, k);
        lag_index[k * parts - 1] = place->second;
        if (is_new) {
          transition.insert(transition.end(), entry->transition.begin(), entry->transition.end());
          variance.insert(variance.end(), entry->variance.begin(), entry->variance.end());
        }
        of.apply(entry->transition.data(), path.data(), moved.data()), path = moved;
        add(path.data(), *entry, input_of(r, series, k));
      }
      std::copy(path.begin(), path.end(), &paths[k * n]);
      const double* z = r.readings + (series * r.length + k) * r.width;
      set_own(r, series * r.length + k);
      const int64_t sensor = sensor_of(r, k);
      const int64_t begin_sensor = std::max<int64_t>(sensor, 0), end = sensor < 0 ? model.sensors : sensor + 1;
      int64_t part = k * parts;
      const auto keep = [&](int64_t which) {
        for (int64_t i = 0; i < m; i++) values[i] -= of.dot(&rows[i * n], path.data());
        std::copy(rows.begin(), rows.end(), &row_table[part * m * n]);
        std::copy(values.begin(), values.end(), &value_table[part * m]);
        channel_of[part++] = which;
      };
      for (int64_t s = begin_sensor; s < end; z += model.sizes[s], s++) {
        for (int64_t i = 0; model.by_component && i < model.sizes[s]; i++) set_component(s, i, z[i]), keep(begin[s] + i);
        if (!model.by_component) set_row(s, z), keep(s);
      }
    }
    auto mean = numbers(total * n), covariance = numbers(total * n * n), weight = numbers(total, 1);
    auto mean_before = numbers(total * n), covariance_before = numbers(total * n * n);
    int64_t overflow = -1;
    Problem p = problem;
    p.length = total, p.smooth = 1;
    p.rows = row_table.data(), p.values = value_table.data(), p.lag_index = lag_index.data();
    p.transition = transition.data(), p.variance = variance.data();
    p.mean = mean.data(), p.covariance = covariance.data(), p.weight = weight.data(), p.overflow = &overflow;
    p.predicted_mean = mean_before.data(), p.predicted_covariance = covariance_before.data();
    if (model.robust) {
      RobustFilter<N>(p, first.state, first.mean, {filter.channels.count, channel_of.data()}).run();
      for (int64_t k = 0; k < total; k++) {
        const double root = std::sqrt(weight[k]);
        for (int64_t i = 0; i < m * n; i++) row_table[k * m * n + i] *= root;
        for (int64_t i = 0; i < m; i++) value_table[k * m + i] *= root;
      }
    }
    if (overflow < 0) smooth_rows<N>(p, first.state, first.mean);
    if (overflow >= 0) fail(OVERFLOWS, overflow / parts);
    for (int64_t k = 0; k < length; k++) {
      const int64_t at = series * r.length + k, part = (k + 1) * parts - 1;
      for (int64_t i = 0; i < n; i++) r.mean[at * n + i] = mean[part * n + i] + paths[k * n + i];
      std::copy(&covariance[part * n * n], &covariance[part * n * n] + n * n, r.covariance + at * n * n);
      for (int64_t i = 0; i < parts; i++) r.weight[at * parts + i] = weight[k * parts + i];
    }
  }

  std::unique_ptr<LinearBase> another() const override { return std::make_unique<LinearFilter<N>>(model, of); }
};

// A filter with the buffers of one reading.
struct BoundFilter {
  std::unique_ptr<LinearBase> filter;
  double *state, *head;  // head: time, sensor
  const double *reading, *input;
  LinearOutput out;
};

}  // namespace rfa

extern "C" {

int64_t rfa_robust_constants_size() { return sizeof(rfa::RobustConstants); }
int64_t rfa_linear_model_size() { return sizeof(rfa::LinearModel); }
int64_t rfa_linear_rows_size() { return sizeof(rfa::LinearRows); }

// None where there is no memory.
void* rfa_linear_new(const rfa::LinearModel* model) try {
  auto bound = std::make_unique<rfa::BoundFilter>();
  rfa::with_size(model->states, [&](auto of) {
    bound->filter = std::make_unique<rfa::LinearFilter<decltype(of)::SIZE>>(*model, of);
  });
  return bound.release();
} catch (const std::exception&) { return nullptr; }

void rfa_linear_free(void* bound) { delete static_cast<rfa::BoundFilter*>(bound); }

int64_t rfa_linear_state_size(void* bound) { return static_cast<rfa::BoundFilter*>(bound)->filter->state_size(); }

// Of `count` series, one after another.
void rfa_linear_start(void* bound, int64_t count, const double* mean, const double* covariance, const double* units,
                      double* state) {
  auto& filter = *static_cast<rfa::BoundFilter*>(bound)->filter;
  const int64_t n = filter.n;
  for (int64_t k = 0; k < count; k++)
    filter.start(mean + k * n, covariance + k * n * n, units, state + k * filter.state_size());
}

// The buffers that rfa_linear_step reads and writes. `out`: mean, covariance, weight and spread of each part, what was
// predicted of each component and its variance, log density.
void rfa_linear_bind(void* to, double* state, double* head, const double* reading, const double* input, double* out,
                     int64_t states, int64_t parts, int64_t width) {
  auto& bound = *static_cast<rfa::BoundFilter*>(to);
  bound.state = state, bound.head = head, bound.reading = reading, bound.input = input;
  double* const begin = out + states + states * states;
  bound.out = {out, out + states, begin, begin + parts, begin + 2 * parts, begin + 2 * parts + width,
               begin + 2 * (parts + width)};
}

int rfa_linear_step(void* of) {
  auto& bound = *static_cast<rfa::BoundFilter*>(of);
  return bound.filter->use(bound.state, bound.head[0], bound.reading, int64_t(bound.head[1]), bound.input, bound.out);
}

// 0, or 1 where there is no memory.
int rfa_linear_run(void* of, const rfa::LinearRows* rows) {
  const auto& filter = *static_cast<rfa::BoundFilter*>(of)->filter;
  const int64_t together = rows->observation || rows->smooth ? 1 : rfa::LANES;  // lanes share C and R
  int failed = 0;
#pragma omp parallel num_threads(rows->threads)
  {
    std::unique_ptr<rfa::LinearBase> own;
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < rows->series; first += together) try {
        if (!own) own = filter.another();
        own->run(*rows, first, std::min(together, rows->series - first));
      } catch (const std::exception&) {
#pragma omp atomic write
        failed = 1;
      }
  }
  return failed;
}

// The weights of a reading of m components that are read off n states by `slope`, for nonlinear_filter.py.
// kinds: 0, weight 1; 1, one weight; 2, one for each component, whose noise is independent; 3, the more probable of both.
// scales: NoiseScale of the reading and of each component, counts then last, which change. given: innovation (m), slope
// (m, n), extra (m, m): its errors, noise (m, m), covariance (n, n), seen (m): 0 where a component is missing, whose slope
// is 0 and whose noise is 1. out: weights (m), scatter (n, n): the covariance between scales of the state, log evidence,
// squared distance of the innovation, log odds of kind 2 over 1, which change. Returns 1 where there is no memory.
int rfa_weigh(const rfa::RobustConstants* constants, int64_t kind, int64_t n, int64_t m, double* scales,
              const double* given, double* out) try {
  const double *innovation = given, *slope = innovation + m, *extra = slope + m * n, *noise = extra + m * m;
  const double *covariance = noise + m * m, *seen = covariance + n * n;
  double *weights = out, *scatter = out + m, &evidence = scatter[n * n], &distance = (&evidence)[1], &odds = (&evidence)[2];
  const rfa::Matrices<0> of(m), states(n);
  auto root = rfa::numbers(m * m), across = rfa::numbers(m * n), variance = rfa::numbers(m * m), e = rfa::numbers(m);
  std::copy(noise, noise + m * m, root.begin()), of.cholesky(root.data());
  const auto solve = [&](const double* l, double* x, int64_t stride) {  // x -> L^-1 x
    for (int64_t i = 0; i < m; i++) {
      for (int64_t k = 0; k < i; k++) x[i * stride] -= l[i * m + k] * x[k * stride];
      x[i * stride] /= l[i * m + i];
    }
  };
  for (int64_t i = 0; i < m; i++) {
    states.apply(covariance, slope + i * n, &across[i * n]), e[i] = innovation[i];
    for (int64_t j = 0; j <= i; j++)
      variance[i * m + j] = variance[j * m + i] = states.dot(slope + j * n, &across[i * n]) + extra[i * m + j];
  }
  for (int64_t j = 0; j < m; j++) solve(root.data(), &variance[j], m);
  for (int64_t i = 0; i < m; i++) solve(root.data(), &variance[i * m], 1);
  for (int64_t j = 0; j < n; j++) solve(root.data(), &across[j], n);
  solve(root.data(), e.data(), 1);

  std::vector<double> total = variance, error = e;
  for (int64_t i = 0; i < m; i++) total[i * m + i] += 1, weights[i] = 1;
  if (!of.cholesky(total.data()))  // rounding: without correlations
    for (int64_t i = 0; i < m * m; i++) total[i] = i % (m + 1) ? 0 : std::sqrt(std::abs(variance[i]) + 1);
  solve(total.data(), error.data(), 1), distance = of.dot(error.data(), error.data()), evidence = -distance / 2;
  for (int64_t i = 0; i < m; i++) evidence -= std::log(total[i * m + i]);
  std::fill(scatter, scatter + n * n, 0.0);
  if (!kind) return 0;

  std::unique_ptr<bool[]> present(new bool[size_t(m)]);
  for (int64_t i = 0; i < m; i++) present[i] = seen[i] != 0;
  const auto infer = [&](int64_t components, double* known, const double* innovation, double* variance, const bool* there) {
    rfa::RowScale<double> row(components);
    rfa::NoiseScale<double> scale(*constants);
    std::copy(known, known + rfa::SCALES, scale.counts.begin());
    std::copy(known + rfa::SCALES, known + 2 * rfa::SCALES, scale.last.begin());
    rfa::ScaleInference<double>(components, *constants).infer(scale.expected(constants->persistence), innovation, variance, there, row);
    for (int i = 0; i < rfa::SCALES; i++) known[i] += row.probability[i], known[rfa::SCALES + i] = row.probability[i];
    return row;
  };
  const auto whole = infer(m, scales, e.data(), variance.data(), present.get());
  evidence = whole.log_evidence;
  std::fill(weights, weights + m, whole.weight);
  for (int64_t a = 0; a < m * m; a++)
    for (int64_t i = 0; i < n * n; i++) scatter[i] += across[a / m * n + i / n] * whole.scatter[a] * across[a % m * n + i % n];
  if (kind == 1) return 0;

  std::vector<double> p(covariance, covariance + n * n), rest(innovation, innovation + m), gain(n), spread(n);
  std::vector<double> each(m, 1.0), between(n * n);
  double sum = 0;
  for (int64_t j = 0; j < m; j++) {
    if (!present[j]) continue;
    const double *row = slope + j * n, own = noise[j * m + j], size = std::sqrt(own);
    states.apply(p.data(), row, spread.data());
    const double predicted = states.dot(row, spread.data()) + extra[j * m + j], left = rest[j], scaled = left / size;
    double in_units = predicted / own;
    const bool there = true;
    const auto found = infer(1, scales + 2 * rfa::SCALES * (1 + j), &scaled, &in_units, &there);
    each[j] = found.weight, sum += found.log_evidence;
    for (int64_t i = 0; i < n; i++) gain[i] = spread[i] / (predicted + own / found.weight);
    for (int64_t i = 0; i < m; i++) rest[i] -= states.dot(slope + i * n, gain.data()) * left;
    for (int64_t i = 0; i < n * n; i++) {
      const double more = spread[i / n] * spread[i % n] * found.scatter[0] / own;
      p[i] += more - gain[i / n] * spread[i % n], between[i] += more;
    }
  }
  odds += sum - evidence;
  if (kind == 3 && odds <= 0) return 0;
  evidence = sum;
  std::copy(each.begin(), each.end(), weights), std::copy(between.begin(), between.end(), scatter);
  return 0;
} catch (const std::exception&) { return 1; }

}  // extern "C"
