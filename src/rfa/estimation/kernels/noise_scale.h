// The scale of each measurement error, as gaussian.py has it: the error of a row comes from N(0, s R).
#pragma once
#include <array>
#include <cstring>

#include "matrices.h"

namespace rfa {

constexpr int SCALES = 18;
using Scales = std::array<double, SCALES>;

// What gaussian.py says of the scales, and of when a challenger starts and ends.
struct RobustConstants {
  Scales scales, prior;  // multiples of R, and their probabilities
  double prior_rows, persistence, largest_variance, rejected;
  double prior_log_odds, most_log_odds_gain, abandoned_log_odds, same_log_odds, no_digits;
};

// What is known of the scales of a series: rows of each scale so far, and the probabilities of the last row.
struct NoiseScale {
  Scales counts, last;

  explicit NoiseScale(const RobustConstants& constants) : last(constants.prior) {
    for (int i = 0; i < SCALES; i++) counts[i] = constants.prior_rows * last[i];
  }

  Scales expected(double persistence) const {
    double sum = 0;
    Scales found;
    for (double count : counts) sum += count;
    for (int i = 0; i < SCALES; i++) found[i] = (1 - persistence) * (counts[i] / sum) + persistence * last[i];
    return found;
  }
};

// What the innovation of a row says of its scale. Without a prediction the row has weight 1.
struct RowScale {
  double weight = 1, log_evidence = 0, mean_variance = 0;
  bool valid = false;
  Scales probability;
  std::vector<double> scatter;  // (m, m)

  explicit RowScale(int64_t m) : scatter(size_t(m * m)) {}

  void full_weight() {
    weight = 1, log_evidence = 0, mean_variance = 0, valid = false;
    std::fill(scatter.begin(), scatter.end(), 0.0);
  }
};

struct ScaleInference {
  const Matrices<0> of;
  const int m;
  const RobustConstants& constants;
  Scales log_density;
  std::vector<double> factor, corrections, mean;
  std::array<double, 3> spread;  // xx, xy, yy of two corrections

  ScaleInference(int64_t components, const RobustConstants& given)
      : of(components), m(int(components)), constants(given), factor(of.nn()), corrections(size_t(SCALES * m)),
        mean(size_t(m)) {}

  // A^-1 e of each scale with A = H + s I, and e^T A^-1 e + log |A|. False where an A is not positive definite.
  bool correct(const double* innovation, const double* variance, const bool* present, const Scales& scales) {
    for (int i = 0; i < SCALES; i++) {
      double* correction = &corrections[i * m];
      std::copy(variance, variance + of.nn(), factor.begin());
      for (int j = 0; j < m; j++) factor[j * m + j] += present[j] ? scales[i] : 1;
      if (!of.cholesky(factor.data())) return false;
      double determinant = 0, distance = 0;
      for (int j = 0; j < m; j++) {
        double sum = innovation[j];
        for (int k = 0; k < j; k++) sum -= factor[j * m + k] * correction[k];
        correction[j] = sum / factor[j * m + j];
        determinant += std::log(factor[j * m + j]);
        distance += correction[j] * correction[j];
      }
      for (int j = m - 1; j >= 0; j--) {
        for (int k = j + 1; k < m; k++) correction[j] -= factor[k * m + j] * correction[k];
        correction[j] /= factor[j * m + j];
      }
      log_density[i] = -distance / 2 - determinant;
    }
    return true;
  }

  // The posterior of a row by its innovation, in units of the noise, and the covariance of its prediction, which may be
  // changed.
  void infer(const Scales& expected, const double* innovation, double* variance, const bool* present, RowScale& row) {
    double square = 0, trace = 0;
    int observed = 0, one = 0, other = 0;
    for (int j = 0; j < m; j++) {
      square += innovation[j] * innovation[j], trace += variance[j * m + j];
      if (present[j]) (observed++ ? other : one) = j;
    }
    Scales scales = constants.scales;
    scales[SCALES - 1] = std::max(scales[SCALES - 1], square / observed);  // so that no row lies above all scales
    double& first = variance[one * m + one];
    if (observed == 1 && first + 1 <= 0) trace = first = -first;  // by rounding
    const double mean = trace / observed, bounded = std::min(mean, constants.largest_variance);
    const double reduction = mean > constants.largest_variance ? bounded / mean : 1;
    std::fill(row.scatter.begin(), row.scatter.end(), 0.0);
    row.mean_variance = mean, row.valid = true;
    if (observed == 1) {
      weigh<1>(expected, scales, {innovation[one], 0}, {first, 0}, bounded, row);
      row.scatter[one * m + one] = reduction * reduction * spread[0];
    } else if (observed != 2 || !pair(expected, scales, innovation, variance, one, other, bounded, row)) {
      general(expected, scales, innovation, variance, present, trace, observed, row);
    } else {
      for (double& part : row.scatter) part *= reduction * reduction;
    }
  }

  // Two components, along the axes of H = [[a, b], [b, d]]. False where rounding has made it indefinite.
  bool pair(const Scales& expected, const Scales& scales, const double* innovation, const double* variance, int i, int j,
            double bounded, RowScale& row) {
    const double a = variance[i * m + i], b = variance[i * m + j], d = variance[j * m + j], r = size((a - d) / 2, b);
    const double large = (a + d) / 2 + r, small = large > 0 ? (a * d - b * b) / large : large - 2 * r;
    if (!(large + 1 > 0 && small + 1 > 0)) return false;
    double c = 1, s = 0;
    if (r > 0 && a >= d) c = std::sqrt((1 + (a - d) / (2 * r)) / 2), s = b / (2 * r * c);
    else if (r > 0) s = std::sqrt((1 + (d - a) / (2 * r)) / 2), c = b / (2 * r * s);
    const double x = innovation[i], y = innovation[j];
    weigh<2>(expected, scales, {c * x + s * y, c * y - s * x}, {large, small}, bounded, row);
    const auto [xx, xy, yy] = spread;
    row.scatter[i * m + i] = c * c * xx - 2 * c * s * xy + s * s * yy;
    row.scatter[j * m + j] = s * s * xx + 2 * c * s * xy + c * c * yy;
    row.scatter[i * m + j] = row.scatter[j * m + i] = c * s * (xx - yy) + (c * c - s * s) * xy;
    return true;
  }

  static double size(double x, double y) {
    const double square = x * x + y * y;
    return square < 1e300 && square > 1e-280 ? std::sqrt(square) : std::hypot(x, y);
  }

  // Of D independent components: the probability of each scale, the weight, and the spread of the correction.
  template <int D> void weigh(const Scales& expected, const Scales& scales, std::array<double, 2> e,
                              std::array<double, 2> variance, double bounded, RowScale& row) {
    std::array<Scales, D> correction;
    Scales& density = row.probability;
    for (int i = 0; i < SCALES; i++) {
      double distance = 0, precision = 1;
      for (int k = 0; k < D; k++) {
        const double inverse = 1 / (variance[k] + scales[i]);
        correction[k][i] = e[k] * inverse, distance += correction[k][i] * e[k], precision *= inverse;
      }
      log_density[i] = -distance / 2, density[i] = expected[i] * std::sqrt(precision);
    }
    double most = log_density[0], sum = 0, above = 0, below = 0;
    for (int i = 1; i < SCALES; i++) most = std::max(most, log_density[i]);
    for (int i = 0; i < SCALES; i++) density[i] *= exponential(log_density[i] - most);
    for (int i = 0; i < SCALES; i++) sum += density[i];
    row.log_evidence = most + std::log(sum);
    std::array<double, D> mean{};
    for (int i = 0; i < SCALES; i++) {
      density[i] /= sum;
      const double ratio = density[i] / (bounded + scales[i]);
      above += ratio, below += ratio * scales[i];
      for (int k = 0; k < D; k++) mean[k] += density[i] * correction[k][i];
    }
    row.weight = above / below;
    spread = {};
    for (int i = 0; i < SCALES; i++) {
      const double x = correction[0][i] - mean[0], y = correction[D - 1][i] - mean[D - 1];
      spread[0] += density[i] * x * x, spread[1] += density[i] * x * y, spread[2] += density[i] * y * y;
    }
  }

  // exp(x) for x <= 0, without a branch, so that the loop over scales has no call.
  static double exponential(double x) {
    constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2^52: what is added to it is rounded to a whole number
    const double shifted = x * 1.4426950408889634 + ROUND, whole = shifted - ROUND;
    const double r = (x - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
    double power = 1.0 / 6227020800;
    for (double factor : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0})
      power = power * r + 1 / factor;
    int64_t bits, exponent;
    std::memcpy(&bits, &power, 8), std::memcpy(&exponent, &shifted, 8);
    bits += int64_t(uint64_t(exponent) << 52);
    std::memcpy(&power, &bits, 8);
    return x > -700 ? power : 0;
  }

  void general(const Scales& expected, const Scales& scales, const double* innovation, double* variance,
               const bool* present, double trace, int observed, RowScale& row) {
    if (!correct(innovation, variance, present, scales)) {  // rounding: without correlations
      for (int j = 0; j < m; j++)
        for (int k = 0; k < m; k++) variance[j * m + k] = j == k ? std::abs(variance[j * m + k]) : 0;
      correct(innovation, variance, present, scales);
      trace = 0;
      for (int j = 0; j < m; j++) trace += variance[j * m + j];
    }
    double sum = 0, most = *std::max_element(log_density.begin(), log_density.end());
    for (int i = 0; i < SCALES; i++) row.probability[i] = expected[i] * std::exp(log_density[i] - most), sum += row.probability[i];
    row.log_evidence = most + std::log(sum);
    const double mean_variance = trace / observed, bounded = std::min(mean_variance, constants.largest_variance);
    row.mean_variance = mean_variance;
    double above = 0, below = 0;
    std::fill(mean.begin(), mean.end(), 0.0);
    for (int i = 0; i < SCALES; i++) {
      row.probability[i] /= sum;
      const double ratio = row.probability[i] / (bounded + scales[i]);
      above += ratio, below += ratio * scales[i];
      for (int j = 0; j < m; j++) mean[j] += row.probability[i] * corrections[i * m + j];
    }
    row.weight = above / below;
    std::fill(row.scatter.begin(), row.scatter.end(), 0.0);
    const double reduction = mean_variance > constants.largest_variance ? bounded / mean_variance : 1;
    for (int i = 0; i < SCALES; i++)
      for (int j = 0; j < m; j++)
        for (int k = 0; k < m; k++)
          row.scatter[j * m + k] += row.probability[i] * reduction * reduction * (corrections[i * m + j] - mean[j]) *
                                    (corrections[i * m + k] - mean[k]);
  }
};

}  // namespace rfa
