// The scale of each measurement error, as robust_weight.py has it: the error of a row comes from N(0, s R).
#pragma once
#include <array>

#include "matrices.h"

namespace rfa {

constexpr int SCALES = 18;
using Scales = std::array<double, SCALES>;

// What robust_weight.py says of the scales, and of when a challenger starts and ends.
struct RobustConstants {
  Scales scales, prior;  // multiples of R, and their probabilities
  double prior_rows, persistence, largest_variance, rejected, prior_log_odds, abandoned_log_odds, same_log_odds, no_digits;
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
  double weight = 1, log_evidence = 0;
  bool valid = false;
  Scales probability;
  std::vector<double> scatter;  // (m, m)

  explicit RowScale(int64_t m) : scatter(size_t(m * m)) {}

  void full_weight() {
    weight = 1, log_evidence = 0, valid = false;
    std::fill(scatter.begin(), scatter.end(), 0.0);
  }
};

struct ScaleInference {
  const Matrices<0> of;
  const int m;
  const RobustConstants& constants;
  Scales log_density;
  std::vector<double> factor, corrections, mean;

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
    int observed = 0;
    for (int j = 0; j < m; j++) square += innovation[j] * innovation[j], trace += variance[j * m + j], observed += present[j];
    Scales scales = constants.scales;
    scales[SCALES - 1] = std::max(scales[SCALES - 1], square / observed);  // so that no row lies above all scales
    if (m == 1) {
      if (variance[0] + 1 <= 0) trace = variance[0] = -variance[0];  // by rounding
      for (int i = 0; i < SCALES; i++) {
        corrections[i] = innovation[0] / (variance[0] + scales[i]);
        log_density[i] = -corrections[i] * innovation[0] / 2;
      }
    } else if (!correct(innovation, variance, present, scales)) {  // rounding: without correlations
      for (int j = 0; j < m; j++)
        for (int k = 0; k < m; k++) variance[j * m + k] = j == k ? std::abs(variance[j * m + k]) : 0;
      correct(innovation, variance, present, scales);
      trace = 0;
      for (int j = 0; j < m; j++) trace += variance[j * m + j];
    }
    double sum = 0, most = *std::max_element(log_density.begin(), log_density.end());
    for (int i = 0; i < SCALES; i++) {
      row.probability[i] = expected[i] * std::exp(log_density[i] - most);
      if (m == 1) row.probability[i] /= std::sqrt(variance[0] + scales[i]);
      sum += row.probability[i];
    }
    row.log_evidence = most + std::log(sum), row.valid = true;
    const double mean_variance = trace / observed, bounded = std::min(mean_variance, constants.largest_variance);
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
