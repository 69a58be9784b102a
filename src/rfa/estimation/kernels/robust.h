// The recursive robust filter with its challenger, as recursive_filter.py has it, one series at a time. The Kalman filter
// is the same with all weights 1.
#pragma once
#include <memory>

#include "noise_scale.h"
#include "smoother.h"

namespace rfa {

constexpr double NONE = -std::numeric_limits<double>::infinity();  // odds where there is no challenger

template <int N> struct Candidate {
  Covariance<N> state;
  std::vector<double> mean;
  std::vector<NoiseScale<double>> scales;  // of each channel
  RowScale<double> row;
};

// Which rows share a scale of their noise: those of one sensor, or of one component of it. By default all do.
struct Channels {
  int64_t count = 1;
  const int64_t* of_row = nullptr;
  int64_t at(int64_t k) const { return of_row ? of_row[k] : 0; }
};

// Of filter and challenger: mean, covariance, and what is known of the noise. Then `trusted` and the odds.
inline int64_t carried_size(int64_t n, int64_t channels) { return 2 * (n + n * n + 2 * SCALES * channels) + 2; }

template <int N> struct RobustFilter {
  const Problem& p;
  const RobustConstants& constants;
  const Channels channels;
  const bool kalman;  // all weights are 1
  const int64_t n, m;
  Series<N> series;  // its accessors and working memory
  Steps<N>& steps;
  Candidate<N> filter, challenger;
  ScaleInference<double> inference;
  double log_odds = NONE;
  double log_density = 0;  // of the last row, in units of its noise, by what was known before it
  int64_t trusted = 0;  // how many rows the challenger will still use with weight 1
  std::vector<double> x, innovation, variance, across, scaled;
  std::unique_ptr<bool[]> present;
  std::vector<Covariance<N>> diffuse;  // the first predicted states, while a direction is diffuse, for smoothing

  RobustFilter(const Problem& problem, const Covariance<N>& start, const std::vector<double>& start_mean, Channels given,
               bool weightless = false)
      : p(problem), constants(*static_cast<const RobustConstants*>(p.constants)), channels(given), kalman(weightless),
        n(p.states), m(p.components), series(problem, start, start_mean), steps(series.steps),
        filter{start, start_mean, std::vector<NoiseScale<double>>(size_t(given.count), NoiseScale<double>(constants)),
               RowScale<double>(m)},
        challenger(filter), inference(m, constants), x(n), innovation(m), variance(size_t(m * m)),
        across(size_t(m * n)), scaled(n), present(new bool[size_t(m)]) {}

  int64_t carried_size() const { return rfa::carried_size(n, channels.count); }

  void resume(const double* from) {
    const double* odds = from + carried_size() - 2;
    trusted = int64_t(odds[0]), log_odds = odds[1];
    from = resume_one(filter, from);
    if (log_odds > NONE) resume_one(challenger, from);
  }

  const double* resume_one(Candidate<N>& one, const double* from) const {
    from = take(from, one.mean), from = take(from, one.state.p);
    for (int64_t i = 0; !kalman && i < channels.count; i++)
      from = take(from, one.scales[i].counts), from = take(from, one.scales[i].last);
    return from + kalman * 2 * SCALES * channels.count;
  }

  template <class Numbers> static const double* take(const double* from, Numbers& to) {
    std::copy(from, from + to.size(), to.begin());
    return from + to.size();
  }

  // A challenger that there is not need not be written again.
  void carry(double* to, bool whole = true) const {
    double* odds = to + carried_size() - 2;
    odds[0] = double(trusted), odds[1] = log_odds;
    for (const Candidate<N>* one : {&filter, &challenger}) {
      if (!whole && one == &challenger && !(log_odds > NONE)) return;
      to = std::copy(one->mean.begin(), one->mean.end(), to);
      to = std::copy(one->state.p.begin(), one->state.p.end(), to);
      if (!whole && kalman) return;
      for (const auto& scale : one->scales) {
        to = std::copy(scale.counts.begin(), scale.counts.end(), to);
        to = std::copy(scale.last.begin(), scale.last.end(), to);
      }
    }
  }

  // The weights of all rows, for smoothing.
  void run() {
    for (int64_t k = 0; k < p.length; k++) {
      if (k) {
        const double *transition = p.transition + series.lag(k), *moved = p.variance + series.lag(k);
        predict(filter, transition, moved);
        if (log_odds > NONE) predict(challenger, transition, moved);
      }
      if (!steps.finite(filter.state.p.data())) {
        *p.overflow = k;
        return;
      }
      use(k);
    }
    smooth();
  }

  double* predicted_mean(int64_t k) const { return p.predicted_mean + k * n; }
  double* predicted_covariance(int64_t k) const { return p.predicted_covariance + k * n * n; }

  // The predicted state at k, for smoothing and for the caller.
  void keep(int64_t k) {
    if (p.smooth && filter.state.diffuse) {
      while (int64_t(diffuse.size()) <= k) diffuse.push_back(filter.state);
    }
    std::copy(filter.state.p.begin(), filter.state.p.end(), predicted_covariance(k));
    std::copy(filter.mean.begin(), filter.mean.end(), predicted_mean(k));
  }

  // From the last row back, each row has two predictions: the filter's, and the same with the future. The one under which
  // the row is more probable gives its weight.
  void smooth() {
    Smoother<N> future(series);
    Candidate<N>&past = filter, &both = challenger;
    Component& c = series.components.all[0];
    for (int64_t k = p.length - 1; k >= 0; k--) {
      if (k < int64_t(diffuse.size())) past.state = diffuse[k];
      else steps.of.copy(predicted_covariance(k), past.state.p.data()), past.state.diffuse = false;
      std::copy(predicted_mean(k), predicted_mean(k) + n, past.mean.begin());
      const bool seen = look(k);
      both = past;
      infer(past, k, seen);
      future.observe();
      future.observe_values();
      for (int64_t r = 0; r < future.rank; r++) {
        steps.update(both.state, &future.c[r * n], c);
        const double e = future.values[r] - steps.of.dot(&future.c[r * n], both.mean.data());
        for (int64_t j = 0; j < n; j++) both.mean[j] += c.gain[j] * e;
      }
      infer(both, k, seen);
      const bool past_wins = !both.row.valid || past.row.log_evidence > both.row.log_evidence;
      const auto& row = past.row.valid && past_wins ? past.row : both.row;
      if (row.valid) past.scales[channels.at(k)].last = row.probability;
      p.weight[k] = row.weight;
      if (k) future.back(k, row.weight);
    }
  }

  void predict(Candidate<N>& one, const double* transition, const double* variance) {
    steps.predict(one.state, transition, variance);
    steps.of.apply(transition, one.mean.data(), x.data());
    one.mean = x;
  }

  void use(int64_t k) {
    const bool seen = look(k), active = log_odds > NONE;
    infer(filter, k, seen);
    bool ended = true, same = false, valid = filter.row.valid;
    const bool predicted = valid;
    log_density = filter.row.log_evidence;
    if (active) {
      infer(challenger, k, seen);
      if (trusted > 0 && challenger.row.weight < constants.rejected) {  // keeps what it says of the scale
        challenger.row.weight = 1;
        std::fill(challenger.row.scatter.begin(), challenger.row.scatter.end(), 0.0);
      }
      valid = valid && challenger.row.valid;
      const double change = valid ? challenger.row.log_evidence - filter.row.log_evidence : 0;
      same = valid && std::abs(change) < constants.same_log_odds;
      log_odds += std::min(change, constants.most_log_odds_gain);
      if (log_odds > 0) filter = challenger;
      ended = log_odds > 0 || !(log_odds > constants.abandoned_log_odds);
    }
    trusted = std::max<int64_t>(trusted - valid, 0);
    if ((ended || same) && filter.row.valid && filter.row.weight < constants.rejected) {
      log_odds = constants.prior_log_odds;
      trusted = 2 * ((n + m - 1) / m - 1);
      challenge(k);
    } else if (ended) {
      log_odds = NONE;
    }
    if (p.predicted_mean) keep(k);
    const double full = update(filter, k, seen);
    if (!predicted) log_density = full;
    if (log_odds > NONE) update(challenger, k, seen);
  }

  // Which components are seen at k, and whether any is.
  bool look(int64_t k) {
    bool any = false;
    for (int64_t i = 0; i < m; i++) {
      present[i] = false;
      for (int64_t j = 0; j < n; j++) present[i] |= series.row(k, i)[j] != 0;
      any |= present[i];
    }
    return any;
  }

  // Innovation, P H^T and H P H^T of a row.
  void expect(const Candidate<N>& one, int64_t k) {
    for (int64_t i = 0; i < m; i++) {
      const double* row = series.row(k, i);
      innovation[i] = series.values(k)[i] - steps.of.dot(row, one.mean.data());
      steps.of.apply_transposed(one.state.p.data(), row, &across[i * n]);
      for (int64_t j = 0; j <= i; j++)
        variance[i * m + j] = variance[j * m + i] = steps.of.dot(series.row(k, j), &across[i * n]);
    }
  }

  void infer(Candidate<N>& one, int64_t k, bool seen) {
    one.row.full_weight();
    if (kalman || !seen || (one.state.diffuse && shows_diffuse(one.state, k))) return;
    expect(one, k);
    double sum = 0;
    for (double e : innovation) sum += e * 0;
    for (double v : variance) sum += v * 0;
    if (sum != 0) return;  // a prediction that overflows gives no weight
    inference.infer(one.scales[channels.at(k)].expected(constants.persistence), innovation.data(), variance.data(), present.get(), one.row);
  }

  // Whether a row shows a diffuse direction. It then has no prediction.
  bool shows_diffuse(const Covariance<N>& state, int64_t k) {
    Covariance<N> copy = state;
    for (int64_t i = 0; i < m; i++) {
      steps.update(copy, series.row(k, i), series.components.all[i]);
      if (series.components.all[i].shows) return true;
    }
    return false;
  }

  // d^2 / m of a row, at least 1: the factor by which the covariance must grow to expect the row.
  double misfit(const Candidate<N>& one, int64_t k) {
    expect(one, k);
    Matrices<0> of(m);
    std::vector<double> inverse(of.nn());
    int64_t observed = 0;
    for (int64_t i = 0; i < m; i++) variance[i * m + i] += 1, observed += present[i];
    of.invert(variance.data(), inverse.data());
    double distance = 0;
    for (int64_t i = 0; i < m; i++) distance += innovation[i] * of.dot(&inverse[i * m], innovation.data());
    return std::isnan(distance) ? 1 : std::max(distance / std::max<int64_t>(observed, 1), 1.0);
  }

  // The challenger that a row starts: the filter, inflated until it expects the row.
  void challenge(int64_t k) {
    challenger = filter;
    if (misfit(challenger, k) > constants.no_digits) std::fill(challenger.mean.begin(), challenger.mean.end(), 0.0);
    const double inflation = misfit(challenger, k);
    for (double& entry : challenger.state.p) entry *= inflation;
    challenger.row.full_weight();
  }

  // After the row with its weight. P H^T scatter H P inflates the covariance. Returns the log density that the row has
  // with weight 1, but for log 2 pi.
  double update(Candidate<N>& one, int64_t k, bool seen) {
    if (!seen) return 0;
    if (one.row.valid) {
      auto& scale = one.scales[channels.at(k)];
      for (int i = 0; i < SCALES; i++) scale.counts[i] += one.row.probability[i];
      scale.last = one.row.probability;
      expect(one, k);
    }
    double distance = 0, determinant = 1, logs = 0;
    const double root = std::sqrt(one.row.weight);
    Component& c = series.components.all[0];
    for (int64_t i = 0; i < m; i++) {
      for (int64_t j = 0; j < n; j++) scaled[j] = root * series.row(k, i)[j];
      steps.update(one.state, scaled.data(), c);
      if (!c.seen) continue;
      const double e = root * series.values(k)[i] - steps.of.dot(scaled.data(), one.mean.data());
      for (int64_t j = 0; j < n; j++) one.mean[j] += c.gain[j] * e;
      if (!c.shows) distance += e * e / c.variance;
      determinant *= c.shows ? c.length : c.variance;
      if (!(determinant < 1e100)) logs += std::log(determinant), determinant = 1;
    }
    if (!one.row.valid) return -(distance + logs + std::log(determinant)) / 2;
    for (int64_t a = 0; a < m; a++)
      for (int64_t b = 0; b < m; b++) {
        const double part = one.row.scatter[a * m + b];
        for (int64_t i = 0; part != 0 && i < n; i++)
          for (int64_t j = 0; j < n; j++) one.state.p[i * n + j] += across[a * n + i] * part * across[b * n + j];
      }
    return 0;
  }
};

}  // namespace rfa
