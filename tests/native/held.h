// Products with matrices held in 8 and 4 bits, against the formula in double precision.
#pragma once

#include "kernels.h"
#include "problems.h"

using flax_attn::Codes;

struct HeldProblem {
  int64_t m, d_in, d_out, block_out, block_in;
  Codes codes;
  std::vector<int32_t> sizes;  // of groups; of none all rows are those of one matrix
  int64_t groups() const { return sizes.empty() ? 1 : static_cast<int64_t>(sizes.size()); }
};

inline double held_number(Codes codes, const std::vector<uint8_t>& matrix, int64_t i) {
  if (codes == Codes::int8) return static_cast<int8_t>(matrix[i]);
  const bool pairs = codes == Codes::e2m1;
  const int bits = pairs ? matrix[i / 2] >> 4 * (i % 2) & 15 : matrix[i];
  const int mantissa = pairs ? 1 : 3, bias = pairs ? 1 : 7, sign = pairs ? 8 : 128;
  const int exponent = (bits & (sign - 1)) >> mantissa, steps = bits & ((1 << mantissa) - 1);
  const int whole = exponent ? steps + (1 << mantissa) : steps;
  return std::ldexp(bits & sign ? -whole : whole, std::max(exponent, 1) - bias - mantissa);
}

// The largest error over the allowed one: each sum, product and scale rounds once.
inline double held_excess(Draw& draw, const HeldProblem& p, Type type, const flax_attn::Kernels& kernels,
                          flax_attn::Pool& pool) {
  const bool pairs = p.codes == Codes::e2m1;
  const int64_t rows = (p.d_out + p.block_out - 1) / p.block_out, columns = (p.d_in + p.block_in - 1) / p.block_in;
  Numbers x = draw.normal(p.m * p.d_in);
  for (double& one : x) one = rounded(one, type);
  Stored stored(x, type);
  std::vector<uint8_t> matrix(p.groups() * p.d_out * p.d_in / (pairs ? 2 : 1)), exponents(p.groups() * rows * columns);
  std::vector<float> scales(exponents.size()), result(p.m * p.d_out, NAN);
  for (uint8_t& one : matrix) {
    one = static_cast<uint8_t>(draw.below(256));
    if (p.codes == Codes::e4m3 && (one & 127) == 127) one = 1;  // NaN
  }
  for (size_t i = 0; i < scales.size(); ++i) {
    exponents[i] = static_cast<uint8_t>(120 + draw.below(14));
    scales[i] = pairs ? std::ldexp(1.0f, exponents[i] - 127) : static_cast<float>(draw.below(1000) + 1) / 700;
  }
  const void* scale = pairs ? static_cast<const void*>(exponents.data()) : scales.data();
  kernels.quantized({p.m, p.groups(), p.d_in, p.d_out, p.block_out, p.block_in, type, p.codes, stored.data(), matrix.data(),
                     scale, p.sizes.empty() ? nullptr : p.sizes.data(), result.data()},
                    pool);
  double most = 0;
  int64_t group = 0, end = p.sizes.empty() ? p.m : p.sizes[0];
  for (int64_t i = 0; i < p.m; ++i) {
    while (i >= end && group + 1 < p.groups()) end += p.sizes[++group];
    for (int64_t j = 0; j < p.d_out; ++j) {
      double exact = 0, size = 0;
      for (int64_t k = 0; k < p.d_in && i < end; ++k) {
        const double one = x[i * p.d_in + k] * held_number(p.codes, matrix, (group * p.d_out + j) * p.d_in + k) *
                           scales[(group * rows + j / p.block_out) * columns + k / p.block_in];
        exact += one, size += std::abs(one);
      }
      const double error = std::abs(result[i * p.d_out + j] - exact);
      const double allowed = static_cast<double>(p.d_in + 3) * 0x1p-23 * size;
      const double share = error == 0 ? 0 : error / allowed;
      if (!(share <= most)) most = share;
    }
  }
  return most;
}
