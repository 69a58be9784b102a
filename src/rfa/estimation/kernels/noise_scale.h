// The scale of each measurement error, as gaussian.py has it: the error of a row comes from N(0, s R).
// T: a number, or those of several series.
#pragma once
#include <array>
#include <type_traits>

#include "lane.h"
#include "matrices.h"

namespace rfa {

constexpr int SCALES = 18;
template <class T> using ScalesOf = std::array<T, SCALES>;
using Scales = ScalesOf<double>;
constexpr double FAR = 1e90;  // a square or a variance from here on: products of three overflow

// What gaussian.py says of the scales, and of when a challenger starts and ends.
struct RobustConstants {
  Scales scales, prior;  // multiples of R, and their probabilities
  double prior_rows, persistence, largest_variance, rejected;
  double prior_log_odds, most_log_odds_gain, abandoned_log_odds, same_log_odds, no_digits;
};

// What is known of the scales of a series: rows of each scale so far, and the probabilities of the last row.
template <class T> struct NoiseScale {
  ScalesOf<T> counts, last;

  explicit NoiseScale(const RobustConstants& constants) {
    for (int i = 0; i < SCALES; i++) last[i] = all<T>(constants.prior[i]), counts[i] = constants.prior_rows * last[i];
  }

  ScalesOf<T> expected(double persistence) const {
    T even{}, odd{};  // two sums, side by side
    for (int i = 0; i < SCALES; i += 2) even += counts[i], odd += counts[i + 1];
    const T learned = (1 - persistence) / (even + odd);
    ScalesOf<T> found;
    for (int i = 0; i < SCALES; i++) found[i] = learned * counts[i] + persistence * last[i];
    return found;
  }
};

// What the innovation of a row says of its scale. Without a prediction the row has weight 1.
template <class T> struct RowScale {
  T weight = all<T>(1), log_evidence{}, mean_variance{};
  bool valid = false;
  ScalesOf<T> probability;
  std::vector<T> scatter;  // (m, m)

  explicit RowScale(int64_t m) : scatter(size_t(m * m)) {}

  void full_weight() {
    weight = all<T>(1), log_evidence = mean_variance = T{}, valid = false;
    std::fill(scatter.begin(), scatter.end(), T{});
  }
};

template <class T> struct ScaleInference {
  const Matrices<0> of;
  const int m;
  const RobustConstants& constants;
  ScalesOf<T> scales, log_density;
  std::vector<T> factor, corrections, mean;
  std::array<T, 3> spread;  // xx, xy, yy of two corrections

  ScaleInference(int64_t components, const RobustConstants& given)
      : of(components), m(int(components)), constants(given), factor(of.nn()), corrections(size_t(SCALES * m)),
        mean(size_t(m)) {
    for (int i = 0; i < SCALES; i++) scales[i] = all<T>(constants.scales[i]);
  }

  // A^-1 e of each scale with A = H + s I, and e^T A^-1 e + log |A|. False where an A is not positive definite.
  Truth<T> correct(const T* innovation, const T* variance, const bool* present) {
    Truth<T> positive = T{} == T{};
    for (int i = 0; i < SCALES; i++) {
      T* correction = &corrections[i * m];
      std::copy(variance, variance + of.nn(), factor.begin());
      for (int j = 0; j < m; j++) factor[j * m + j] += present[j] ? scales[i] : all<T>(1);
      positive = positive & of.cholesky(factor.data());
      T logs{}, distance{};
      for (int j = 0; j < m; j++) {
        T sum = innovation[j];
        for (int k = 0; k < j; k++) sum -= factor[j * m + k] * correction[k];
        correction[j] = sum / factor[j * m + j];
        logs += logarithm(factor[j * m + j]);
        distance += correction[j] * correction[j];
      }
      for (int j = m - 1; j >= 0; j--) {
        for (int k = j + 1; k < m; k++) correction[j] -= factor[k * m + j] * correction[k];
        correction[j] /= factor[j * m + j];
      }
      log_density[i] = -distance / 2 - logs;
    }
    return positive;
  }

  // The posterior of a row by its innovation, in units of the noise, and the covariance of its prediction, which may be
  // changed. False where numbers of several series are too large, or rounding has made a covariance indefinite.
  Truth<T> infer(const ScalesOf<T>& expected, const T* innovation, T* variance, const bool* present, RowScale<T>& row) {
    T square{}, trace{};
    int observed = 0, one = 0, other = 0;
    for (int j = 0; j < m; j++) {
      square += innovation[j] * innovation[j], trace += variance[j * m + j];
      if (present[j]) (observed++ ? other : one) = j;
    }
    // so that no row lies above all scales
    scales[SCALES - 1] = larger<T>(all<T>(constants.scales[SCALES - 1]), square / double(observed));
    T& first = variance[one * m + one];
    if (observed == 1) trace = first = choose<T>(first > all<T>(-1), first, -first);  // by rounding
    const T mean_variance = trace / double(observed), limit = all<T>(constants.largest_variance);
    const T bounded = choose<T>(mean_variance > limit, limit, mean_variance);
    std::fill(row.scatter.begin(), row.scatter.end(), T{});
    row.mean_variance = mean_variance, row.valid = true;
    Truth<T> done = square + trace < all<T>(FAR);
    if (observed == 1) {
      weigh<1>(expected, {innovation[one]}, {first}, bounded, row);
      row.scatter[one * m + one] = spread[0];
    } else if (observed == 2) {
      done = done & pair(expected, innovation, variance, one, other, bounded, row);
    }
    if (observed > 2) done = general(expected, innovation, variance, present, trace, observed, row);
    else if constexpr (std::is_same_v<T, double>) if (!done) general(expected, innovation, variance, present, trace, observed, row);
    const T reduction = choose<T>(row.mean_variance > limit, limit / row.mean_variance, all<T>(1));
    for (T& part : row.scatter) part *= reduction * reduction;
    return done;
  }

  // Two components, along the axes of H = [[a, b], [b, d]]. False where rounding has made it indefinite.
  Truth<T> pair(const ScalesOf<T>& expected, const T* innovation, const T* variance, int i, int j, T bounded,
                RowScale<T>& row) {
    const T a = variance[i * m + i], b = variance[i * m + j], d = variance[j * m + j], half = (a - d) / 2;
    const T r = root(half * half + b * b), large = (a + d) / 2 + r, none{}, unit = all<T>(1);
    const T small = choose<T>(large > none, (a * d - b * b) / large, large - 2 * r), inverse = 1 / (2 * r);
    const T most = root((1 + choose<T>(half > none, half, -half) * (2 * inverse)) / 2), least = b * inverse / most;
    const T c = choose<T>(r > none, choose<T>(half >= none, most, least), unit);
    const T s = choose<T>(r > none, choose<T>(half >= none, least, most), none);
    const T x = innovation[i], y = innovation[j];
    weigh<2>(expected, {c * x + s * y, c * y - s * x}, {large, small}, bounded, row);
    const auto [xx, xy, yy] = spread;
    row.scatter[i * m + i] = c * c * xx - 2 * c * s * xy + s * s * yy;
    row.scatter[j * m + j] = s * s * xx + 2 * c * s * xy + c * c * yy;
    row.scatter[i * m + j] = row.scatter[j * m + i] = c * s * (xx - yy) + (c * c - s * s) * xy;
    return (large > -unit) & (small > -unit);
  }

  // Of D independent components: the probability of each scale, the weight, and the spread of the correction.
  template <int D> void weigh(const ScalesOf<T>& expected, std::array<T, D> e, std::array<T, D> variance, T bounded,
                              RowScale<T>& row) {
    std::array<ScalesOf<T>, D> correction;
    ScalesOf<T>& density = row.probability;
    ScalesOf<T> ratio;
    T most{};  // the log density of the largest scale, but for the determinant
    for (int k = 0; k < D; k++) most -= e[k] * e[k] / (2 * (variance[k] + scales[SCALES - 1]));
    for (int i = 0; i < SCALES; i++) {  // in several loops: their steps overlap
      const T first = variance[0] + scales[i], second = D > 1 ? variance[D - 1] + scales[i] : all<T>(1);
      const T product = first * second, other = bounded + scales[i], inverse = 1 / (product * other);
      const T precision = inverse * other;
      ratio[i] = inverse * product;
      correction[0][i] = e[0] * (second * precision);
      if (D > 1) correction[D - 1][i] = e[D - 1] * (first * precision);
      density[i] = expected[i] * root(precision);
    }
    for (int i = 0; i < SCALES; i++) {
      T distance = e[0] * correction[0][i];
      if (D > 1) distance += e[D - 1] * correction[D - 1][i];
      density[i] *= exponential<T>(-distance / 2 - most);
    }
    T sum{}, above{}, below{};
    std::array<T, D> mean{};
    for (int i = 0; i < SCALES; i++) {
      const T part = density[i] * ratio[i];
      sum += density[i], above += part, below += part * scales[i];
      for (int k = 0; k < D; k++) mean[k] += density[i] * correction[k][i];
    }
    const T inverse = 1 / sum;
    row.log_evidence = most + logarithm(sum), row.weight = above / below;
    for (T& part : mean) part *= inverse;
    T xx{}, xy{}, yy{};
    for (int i = 0; i < SCALES; i++) {
      density[i] *= inverse;
      const T x = correction[0][i] - mean[0], y = correction[D - 1][i] - mean[D - 1];
      xx += density[i] * x * x, xy += density[i] * x * y, yy += density[i] * y * y;
    }
    spread = {xx, xy, yy};
  }

  Truth<T> general(const ScalesOf<T>& expected, const T* innovation, T* variance, const bool* present, T trace,
                   int observed, RowScale<T>& row) {
    const Truth<T> done = correct(innovation, variance, present);
    if constexpr (std::is_same_v<T, double>) if (!done) {  // rounding: without correlations
      for (int j = 0; j < m; j++)
        for (int k = 0; k < m; k++) variance[j * m + k] = j == k ? std::abs(variance[j * m + k]) : 0;
      correct(innovation, variance, present);
      trace = 0;
      for (int j = 0; j < m; j++) trace += variance[j * m + j];
    }
    T sum{}, most = log_density[0];
    for (T each : log_density) most = larger<T>(most, each);
    for (int i = 0; i < SCALES; i++) row.probability[i] = expected[i] * exponential<T>(log_density[i] - most), sum += row.probability[i];
    row.log_evidence = most + logarithm(sum);
    const T limit = all<T>(constants.largest_variance);
    row.mean_variance = trace / double(observed);
    const T bounded = choose<T>(row.mean_variance > limit, limit, row.mean_variance);
    T above{}, below{};
    std::fill(mean.begin(), mean.end(), T{});
    for (int i = 0; i < SCALES; i++) {
      row.probability[i] /= sum;
      const T ratio = row.probability[i] / (bounded + scales[i]);
      above += ratio, below += ratio * scales[i];
      for (int j = 0; j < m; j++) mean[j] += row.probability[i] * corrections[i * m + j];
    }
    row.weight = above / below;
    std::fill(row.scatter.begin(), row.scatter.end(), T{});
    for (int i = 0; i < SCALES; i++)
      for (int j = 0; j < m; j++)
        for (int k = 0; k < m; k++)
          row.scatter[j * m + k] += row.probability[i] * (corrections[i * m + j] - mean[j]) *
                                    (corrections[i * m + k] - mean[k]);
    return done;
  }
};

}  // namespace rfa
