// Several series side by side through the filter of linear.cpp, a lane for each. A lane in which something rare happens (a
// challenger, a diffuse state, a reading that is there in part, a fault) takes that row alone, by the filter of one series.
#pragma once
#include "noise_scale.h"

namespace rfa {

template <int N> struct LaneFilter {
  // What has a weight of its own in a row, a sensor or a component of it: L^-1 C, L, and the diagonal of R.
  struct Part {
    int64_t channel, size, stride;  // stride: between rows of L and R
    const double *rows, *factor, *noise;
    double logs;  // log |L|
    RowScale<Lanes> row;
    ScaleInference<Lanes> inference;
    Truth<Lanes> seen{};
  };
  using Numbers = std::vector<Lanes>;

  LinearBase& alone;
  const Matrices<N> of;
  const bool robust;
  std::vector<Part> parts;
  std::vector<int64_t> first_part;  // of each sensor
  std::vector<NoiseScale<Lanes>> scales;
  Numbers mean, p, old_mean, old_p, transition, added, by_input;
  Numbers work, values, predicted, innovation, across, variance, expected_variance, gain, spread, row, residual;
  std::unique_ptr<bool[]> present;
  int count = 0;
  double* states[LANES];
  const double* reading[LANES];
  double time[LANES], next[LANES], gap[LANES];
  bool together[LANES], ended[LANES];

  explicit LaneFilter(LinearBase& filter) : alone(filter), of(filter.n), robust(filter.model.robust) {}

  void prepare() {
    const auto& model = alone.model;
    int64_t most = 1;
    for (int64_t s = 0; s < model.sensors; s++) {
      const int64_t size = model.sizes[s], each = model.by_component ? 1 : size;
      most = std::max(most, each), first_part.push_back(int64_t(parts.size()));
      for (int64_t i = 0; i < size; i += each) {
        const double* factor = &alone.factors[s][i * (size + 1)];
        parts.push_back({model.by_component ? alone.begin[s] + i : s, each, size, &alone.full[s][i * of.n()], factor,
                         alone.noise(s) + i * (size + 1), model.by_component ? std::log(*factor) : alone.full_logs[s],
                         RowScale<Lanes>(each), ScaleInference<Lanes>(each, alone.constants)});
      }
    }
    first_part.push_back(int64_t(parts.size()));
    scales.resize(size_t(robust ? alone.channels() : 0), NoiseScale<Lanes>(alone.constants));
    for (auto* one : {&mean, &old_mean, &gain, &spread, &row, &residual}) one->resize(size_t(of.n()));
    for (auto* one : {&p, &old_p, &transition, &added}) one->resize(size_t(of.nn()));
    for (auto* one : {&values, &predicted, &innovation, &expected_variance}) one->resize(size_t(most));
    by_input.resize(size_t(of.n() * model.inputs)), across.resize(size_t(most * of.n()));
    work.resize(size_t(std::max<int64_t>(most, of.n()) * of.n())), variance.resize(size_t(most * most));
    present.reset(new bool[size_t(most)]), std::fill(&present[0], &present[most], true);
  }

  // Rows of some series, at most LANES.
  void run(const LinearRows& r, int64_t first, int64_t series) {
    if (parts.empty()) prepare();
    count = int(series);
    for (int l = 0; l < LANES; l++) {
      together[l] = false, ended[l] = l >= count, gap[l] = NO_NUMBER;
      if (!ended[l]) states[l] = r.state + (first + l) * alone.state_size(), take(l);
    }
    for (int64_t k = 0; k < r.length; k++) {
      for (int l = 0; l < LANES; l++) {
        const int64_t each = first + std::min(l, count - 1);
        next[l] = r.times[each * r.time_stride + k], reading[l] = r.readings + (each * r.length + k) * r.width;
      }
      step(r, first, k);
    }
    for (int l = 0; l < count; l++)
      if (together[l]) give(l, mean, p);
  }

  // Between the lanes and the numbers of a series, as LinearFilter::load has them.
  template <class Move> void move(double* state, Numbers& mean, Numbers& p, Move one) {
    for (Lanes& number : mean) one(*state++, number);
    for (Lanes& number : p) one(*state++, number);
    for (auto& scale : scales)
      for (auto* numbers : {&scale.counts, &scale.last})
        for (Lanes& number : *numbers) one(*state++, number);
  }
  void give(int l, Numbers& mean, Numbers& p) {
    move(states[l], mean, p, [l](double& to, Lanes& from) { to = from[l]; });
    states[l][alone.state_size() - 1] = time[l];
  }
  void take(int l) {
    const double* state = states[l];
    time[l] = state[alone.state_size() - 1], together[l] = alone.ordinary(state);
    if (together[l]) move(states[l], mean, p, [l](double& from, Lanes& to) { to[l] = from; });
  }

  void step(const LinearRows& r, int64_t first, int64_t k) {
    const int64_t sensor = alone.sensor_of(r, k);
    Truth<Lanes> done{};
    if (std::any_of(together, together + LANES, [](bool each) { return each; })) done = row_of_all(r, first, k, sensor);
    for (int l = 0; l < count; l++) {
      if (together[l] && done[l]) time[l] = next[l];
      else if (!ended[l]) {
        if (together[l]) give(l, old_mean, old_p);
        const Fault fault = alone.use(states[l], next[l], reading[l], sensor, alone.input_of(r, first + l, k),
                                      alone.output(r, (first + l) * r.length + k));
        if (fault) r.fault[2 * (first + l)] = fault, r.fault[2 * (first + l) + 1] = k;
        ended[l] = fault, together[l] = false;
        if (!fault) take(l);
      }
    }
  }

  // False where a lane must take the row alone, from its state before.
  Truth<Lanes> row_of_all(const LinearRows& r, int64_t first, int64_t k, int64_t sensor) {
    mean.swap(old_mean), p.swap(old_p);
    Truth<Lanes> done = predict(r, first, k);
    const int64_t begin = sensor < 0 ? 0 : first_part[sensor], end = sensor < 0 ? int64_t(parts.size()) : first_part[sensor + 1];
    const int64_t at = first * r.length + k, n = of.n();
    const Lanes none{}, missing = all<Lanes>(NO_NUMBER);
    Lanes log_density{};
    for (int64_t i = 0; r.sensor && i < r.width; i++)  // a sensor may have fewer components than the row
      for (double* to : {r.predicted, r.variance}) put(&missing, 1, to + at * r.width + i, r.length * r.width);
    for (int64_t i = 0; r.sensor && i < r.parts; i++)
      for (double* to : {r.weight, r.spread}) put(&missing, 1, to + at * r.parts + i, r.length * r.parts);
    for (int64_t i = begin, width = 0; i < end; width += parts[i].size, i++) {
      Part& part = parts[i];
      done = done & read(part, width);
      expect(part);
      put(predicted.data(), part.size, r.predicted + at * r.width + width, r.length * r.width);
      put(expected_variance.data(), part.size, r.variance + at * r.width + width, r.length * r.width);
      done = done & use(part, log_density);
      const Lanes weight = choose<Lanes>(part.seen, part.row.weight, missing);
      const Lanes mean_variance = choose<Lanes>(part.seen, part.row.mean_variance, none);
      put(&weight, 1, r.weight + at * r.parts + i - begin, r.length * r.parts);
      put(&mean_variance, 1, r.spread + at * r.parts + i - begin, r.length * r.parts);
    }
    Lanes sum{};
    for (Lanes number : p) sum += number * 0;
    done = done & (sum == none);
    put(mean.data(), n, r.mean + at * n, r.length * n);
    put(p.data(), n * n, r.covariance + at * n * n, r.length * n * n);
    put(&log_density, 1, r.log_density + at, r.length);
    for (int64_t i = begin; robust && i < end; i++) {
      NoiseScale<Lanes>& scale = scales[parts[i].channel];
      const Truth<Lanes> where = done & parts[i].seen;
      for (int s = 0; s < SCALES; s++) {
        const Lanes probability = parts[i].row.probability[s];
        scale.counts[s] += choose<Lanes>(where, probability, Lanes{});
        scale.last[s] = choose<Lanes>(where, probability, scale.last[s]);
      }
    }
    return done;
  }

  // Numbers of each lane, to rows `stride` apart.
  void put(const Lanes* from, int64_t size, double* to, int64_t stride) const {
    int64_t done = 0;
#if defined(__AVX__)
    for (; count == LANES && done + 4 <= size; done += 4)
      for (int l = 0; l < LANES; l += 4)
        transpose(reinterpret_cast<const double*>(from + done) + l, to + l * stride + done, stride);
#endif
    for (int l = 0; l < count; l++)
      for (int64_t i = done; i < size; i++) to[l * stride + i] = from[i][l];
  }

  Truth<Lanes> predict(const LinearRows& r, int64_t first, int64_t k) {
    const int64_t n = of.n(), inputs = alone.model.inputs;
    Lanes fine = all<Lanes>(1);
    bool moves = false;
    double gaps[LANES];
    for (int l = 0; l < LANES; l++) {
      gaps[l] = together[l] && !std::isnan(time[l]) ? next[l] - time[l] : 0;
      if (!(gaps[l] >= 0)) fine[l] = gaps[l] = 0;
      moves |= gaps[l] > 0;
    }
    if (!moves) {
      mean = old_mean, p = old_p;
      return fine > Lanes{};
    }
    for (int l = 0; l < LANES; l++) {
      if (gaps[l] == gap[l]) continue;
      const auto* entry = gaps[l] > 0 ? alone.at(gaps[l]) : nullptr;
      if (!entry && gaps[l] > 0) fine[l] = 0;
      gap[l] = gaps[l];
      for (int64_t i = 0; i < n * n; i++) transition[i][l] = entry ? entry->transition[i] : i % (n + 1) == 0;
      for (int64_t i = 0; i < n * n; i++) added[i][l] = entry ? entry->variance[i] : 0;
      for (int64_t i = 0; i < n * inputs; i++) by_input[i][l] = entry ? entry->input[i] : 0;
    }
    for (int64_t i = 0; i < n; i++) {
      Lanes sum{};
      for (int64_t j = 0; j < n; j++) sum += transition[i * n + j] * old_mean[j];
      mean[i] = sum;
      for (int64_t j = 0; j < n; j++) {
        Lanes part{};
        for (int64_t q = 0; q < n; q++) part += transition[i * n + q] * old_p[j * n + q];
        work[i * n + j] = part;
      }
    }
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j <= i; j++) {
        Lanes sum = added[i * n + j];
        for (int64_t q = 0; q < n; q++) sum += work[i * n + q] * transition[j * n + q];
        p[i * n + j] = p[j * n + i] = sum;
      }
    for (int l = 0; r.input && l < count; l++) {
      const double* input = alone.input_of(r, first + l, k);
      for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < inputs; j++) mean[i][l] += by_input[i * inputs + j][l] * input[j];
    }
    return fine > Lanes{};
  }

  // The reading in units of its noise. False where some of its components are missing, or too large.
  Truth<Lanes> read(Part& part, int64_t at) {
    Truth<Lanes> whole = Lanes{} == Lanes{}, none = whole, small = whole;
    for (int64_t i = 0; i < part.size; i++) {
      Lanes z;
      for (int l = 0; l < LANES; l++) z[l] = reading[l][at + i];
      const Truth<Lanes> here = z == z;
      values[i] = choose<Lanes>(here, z, Lanes{});
      whole = whole & here, none = none & ~here;
    }
    part.seen = whole;
    for (int64_t i = 0; i < part.size; i++) {
      const double* factor = part.factor + i * part.stride;
      for (int64_t k = 0; k < i; k++) values[i] -= factor[k] * values[k];
      values[i] *= 1 / factor[i];
      small = small & (values[i] < all<Lanes>(LARGEST_VALUE)) & (values[i] > all<Lanes>(-LARGEST_VALUE));
    }
    return (whole | none) & small;
  }

  // Innovation, P H^T and H P H^T; what is expected of each component, and its variance.
  void expect(const Part& part) {
    const int64_t n = of.n(), m = part.size;
    for (int64_t i = 0; i < m; i++) {
      const double* h = part.rows + i * n;
      Lanes sum{};
      for (int64_t j = 0; j < n; j++) sum += h[j] * mean[j];
      predicted[i] = sum, innovation[i] = values[i] - sum;
      for (int64_t j = 0; j < n; j++) {
        Lanes one{};
        for (int64_t q = 0; q < n; q++) one += h[q] * p[j * n + q];
        across[i * n + j] = one;
      }
      for (int64_t j = 0; j <= i; j++) {
        Lanes both{};
        for (int64_t q = 0; q < n; q++) both += part.rows[j * n + q] * across[i * n + q];
        variance[i * m + j] = variance[j * m + i] = both;
      }
    }
    for (int64_t i = m - 1; i >= 0; i--) {
      const double* factor = part.factor + i * part.stride;
      Lanes sum{}, square{};
      for (int64_t j = 0; j <= i; j++) {
        Lanes one{};
        for (int64_t k = 0; k <= i; k++) one += factor[k] * variance[j * m + k];
        sum += factor[j] * predicted[j], square += factor[j] * one;
      }
      predicted[i] = sum, expected_variance[i] = part.noise[i * (part.stride + 1)] + larger<Lanes>(square, Lanes{});
    }
  }

  // As RobustFilter::use without a challenger. False where one would start.
  Truth<Lanes> use(Part& part, Lanes& log_density) {
    const int64_t n = of.n(), m = part.size;
    const Lanes none{}, unit = all<Lanes>(1);
    Truth<Lanes> done = none == none;
    Lanes factor = unit;
    if (robust) {
      const auto& constants = part.inference.constants;
      const auto expected = scales[part.channel].expected(constants.persistence);
      done = part.inference.infer(expected, innovation.data(), variance.data(), present.get(), part.row);
      done = ~part.seen | (done & (part.row.weight >= all<Lanes>(constants.rejected)));
      factor = root(part.row.weight);
    }
    factor = choose<Lanes>(part.seen, factor, none);
    Lanes distance{}, determinant = unit, logs{};
    for (int64_t i = 0; i < m; i++) {
      const double* h = part.rows + i * n;
      Lanes sum{}, e = factor * values[i];
      for (int64_t j = 0; j < n; j++) row[j] = factor * h[j], e -= row[j] * mean[j];
      for (int64_t j = 0; j < n; j++) {
        Lanes one{};
        for (int64_t q = 0; i && q < n; q++) one += p[j * n + q] * row[q];
        spread[j] = i ? one : factor * across[j];
        sum += row[j] * spread[j];
      }
      done = done & (sum <= all<Lanes>(LITTLE_LEFT));
      const Lanes inverse = 1 / (sum + 1);
      for (int64_t j = 0; j < n; j++) gain[j] = spread[j] * inverse, mean[j] += gain[j] * e;
      for (int64_t j = 0; j < n; j++)  // Joseph's form, as in gaussian.h
        for (int64_t q = 0; q <= j; q++) p[j * n + q] = p[q * n + j] = p[j * n + q] - gain[j] * spread[q];
      for (int64_t j = 0; j < n; j++) {
        residual[j] = gain[j];
        for (int64_t q = 0; q < n; q++) residual[j] -= p[j * n + q] * row[q];
        residual[j] *= 0.5;
      }
      for (int64_t j = 0; j < n; j++)
        for (int64_t q = 0; q <= j; q++)
          p[j * n + q] = p[q * n + j] = p[j * n + q] + (residual[j] * gain[q] + gain[j] * residual[q]);
      distance += e * e * inverse, determinant *= sum + 1;
      if (i % 16 == 15 || i == m - 1) logs += logarithm(determinant), determinant = unit;
    }
    const Lanes found = robust ? part.row.log_evidence : -(distance + logs) / 2;
    log_density += choose<Lanes>(part.seen, found - (part.logs + double(m) * LOG_TWO_PI / 2), none);
    for (int64_t a = 0; robust && a < m; a++) {
      for (int64_t j = 0; j < n; j++) {
        Lanes sum{};
        for (int64_t b = 0; b < m; b++) sum += part.row.scatter[a * m + b] * across[b * n + j];
        spread[j] = choose<Lanes>(part.seen, sum, none);
      }
      for (int64_t j = 0; j < n; j++)
        for (int64_t q = 0; q <= j; q++) p[j * n + q] = p[q * n + j] = p[j * n + q] + across[a * n + j] * spread[q];
    }
    return done;
  }
};

}  // namespace rfa
