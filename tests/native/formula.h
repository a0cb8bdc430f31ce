// Attention and its gradients as the formula gives them, one score after the other, in float or double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using Numbers = std::vector<double>;  // an array of a call, of numbers that its type holds

struct Problem {
  int64_t b, t, s, n, k, h, v;
  double scale, soft_cap;  // 0 is none
  Numbers query, key, value, cotangent, sinks;  // tokens first; sinks (b, n), or empty
  std::vector<int32_t> start, stop, query_segment, key_segment;
  int64_t dense_b, dense_n, dense_t;  // 1, or as many as there are
  std::vector<uint8_t> dense;         // (dense_b, dense_n, dense_t, s), or empty

  int64_t q_at(int64_t i, int64_t j, int64_t head, int64_t width) const { return ((i * t + j) * n + head) * width; }
  int64_t k_at(int64_t i, int64_t j, int64_t head, int64_t width) const {
    return ((i * s + j) * k + head / (n / k)) * width;
  }
  bool visible(int64_t i, int64_t head, int64_t row, int64_t col) const {
    const int64_t at = i * t + row, array = i % dense_b * dense_n + head % dense_n;
    if (!dense.empty() && !dense[(array * dense_t + row % dense_t) * s + col]) return false;
    return col >= start[at] && col < stop[at] &&
           (query_segment.empty() || query_segment[at] == key_segment[i * s + col]);
  }
};

struct Answer {
  Numbers output, d_query, d_key, d_value;
  explicit Answer(const Problem& x)
      : output(x.b * x.t * x.n * x.v), d_query(x.query.size()), d_key(x.key.size()), d_value(x.value.size()) {}
};

template <typename Real>
Real dot(const double* x, const double* y, int64_t width) {
  Real total = 0;
  for (int64_t c = 0; c < width; ++c) total += Real(x[c]) * Real(y[c]);
  return total;
}

// One query of one head. What is not visible is not read.
template <typename Real>
void attend_row(const Problem& x, int64_t i, int64_t row, int64_t head, Answer& to) {
  std::vector<int64_t> cols;
  std::vector<Real> scores, slopes;  // slopes: of the soft cap
  Real rest = 0;                     // NaN where the row sees a number that is not finite, and then all of it is
  const double* query = &x.query[x.q_at(i, row, head, x.h)];
  for (int64_t col = 0; col < x.s; ++col) {
    if (!x.visible(i, head, row, col)) continue;
    Real score = dot<Real>(query, &x.key[x.k_at(i, col, head, x.h)], x.h) * Real(x.scale), slope = 1;
    if (x.soft_cap > 0) {
      const Real tanh = std::tanh(score / Real(x.soft_cap));
      score = tanh * Real(x.soft_cap);
      slope = 1 - tanh * tanh;
    }
    rest += score * 0;
    cols.push_back(col);
    scores.push_back(score);
    slopes.push_back(slope);
  }
  const Real sink = x.sinks.empty() ? -std::numeric_limits<Real>::infinity() : Real(x.sinks[i * x.n + head]);
  Real top = sink, total = 0;
  for (Real score : scores) top = score > top || std::isnan(score) ? score : top;
  if (std::isinf(top) && top < 0) return;  // sees nothing
  for (Real& score : scores) total += score = std::exp(score - top);
  total += std::exp(sink - top);
  for (Real& score : scores) score /= total;  // a weight from here on
  const int64_t at = x.q_at(i, row, head, x.v);
  std::vector<Real> output(x.v);
  for (size_t j = 0; j < cols.size(); ++j)
    for (int64_t c = 0; c < x.v; ++c) {
      const Real value = Real(x.value[x.k_at(i, cols[j], head, x.v) + c]);
      output[c] += scores[j] * value;
      rest += value * 0;
    }
  const double* cotangent = &x.cotangent[at];
  Real delta = 0;
  for (int64_t c = 0; c < x.v; ++c) {
    to.output[at + c] = output[c] + rest;
    delta += output[c] * Real(cotangent[c]);
  }
  for (size_t j = 0; j < cols.size(); ++j) {
    const int64_t key = x.k_at(i, cols[j], head, x.h), value = x.k_at(i, cols[j], head, x.v);
    const Real change = scores[j] * (dot<Real>(cotangent, &x.value[value], x.v) - delta) * slopes[j] * Real(x.scale);
    for (int64_t c = 0; c < x.v; ++c) to.d_value[value + c] = Real(to.d_value[value + c] + scores[j] * Real(cotangent[c]));
    for (int64_t c = 0; c < x.h; ++c) {
      to.d_query[x.q_at(i, row, head, x.h) + c] =
          Real(to.d_query[x.q_at(i, row, head, x.h) + c] + change * Real(x.key[key + c]));
      to.d_key[key + c] = Real(to.d_key[key + c] + change * Real(query[c]));
    }
  }
}

template <typename Real>
Answer formula(const Problem& x) {
  Answer answer(x);
  for (int64_t i = 0; i < x.b; ++i)
    for (int64_t head = 0; head < x.n; ++head)
      for (int64_t row = 0; row < x.t; ++row) attend_row<Real>(x, i, row, head, answer);
  return answer;
}
