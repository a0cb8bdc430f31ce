// Random problems: what each is made of is drawn from lists that hold a size below and above every block of the kernels.
#pragma once

#include <random>

#include "calls.h"
#include "formula.h"

// A number as a type holds it: the nearest one or, where `coin` is given, one of the two neighbours at random.
inline double rounded(double x, flax_attn::Type type, std::mt19937* coin = nullptr) {
  if (!(std::abs(x) < 1e30)) return x;  // such as NaN or the largest one
  int exponent;
  std::frexp(x, &exponent);
  if (type == flax_attn::Type::float16) exponent = std::max(exponent, -13);  // subnormal below
  const int digits = type == flax_attn::Type::float32 ? 24 : type == flax_attn::Type::bfloat16 ? 8 : 11;
  const double steps = std::ldexp(x, digits - exponent);
  return std::ldexp(!coin ? std::nearbyint(steps) : (*coin)() % 2 ? std::ceil(steps) : std::floor(steps), exponent - digits);
}

struct Draw {
  std::mt19937 engine;
  explicit Draw(unsigned seed) : engine(seed) {}
  int64_t below(int64_t limit) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(limit)); }
  int64_t of(const std::vector<int64_t>& sizes) { return sizes[below(sizes.size())]; }
  Numbers normal(int64_t size) {
    std::normal_distribution<double> one;
    Numbers made(size);
    for (double& x : made) x = one(engine);
    return made;
  }
};

// One below, at and above: registers and tiles (4, 8, 16 wide), LANES (8, 16, 32), QUERIES and CHUNK (64), KEYS (128),
// FEW (16), PANELS * LANES (32, 64, 128), the keys of a part of decoding (256) and of a task that copies them (256).
inline const std::vector<int64_t> QUERY_SIZES{1, 2, 3, 15, 16, 17, 18, 31, 32, 33, 63, 64, 65, 127, 128, 129};
inline const std::vector<int64_t> KEY_SIZES{1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257};
inline const std::vector<int64_t> WIDTHS{1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64};

inline void draw_mask(Draw& draw, Problem& x) {
  const int64_t kind = draw.below(5), offset = draw.below(x.s + x.t) - x.t, left = draw.below(x.s), right = draw.below(4);
  for (int64_t i = 0; i < x.b * x.t; ++i) {
    const int64_t at = i % x.t + offset, length = (i / x.t + 1) * x.s / x.b;
    const bool low = kind == 2 || kind == 4, high = kind > 0 && kind != 3;
    x.start.push_back(static_cast<int32_t>(low ? at - left : kind == 1 ? INT32_MIN : 0));
    x.stop.push_back(static_cast<int32_t>(high ? at + right : kind == 3 ? length : x.s + draw.below(2) * 1000));
  }
  if (draw.below(3) > 0) return;
  const int64_t segments = 1 + draw.below(4), size = 1 + draw.below(40);
  const bool sorted = draw.below(2);
  for (int64_t i = 0; i < x.b * x.t; ++i)
    x.query_segment.push_back(static_cast<int32_t>(sorted ? i % x.t / size : draw.below(segments)));
  for (int64_t i = 0; i < x.b * x.s; ++i)
    x.key_segment.push_back(static_cast<int32_t>(sorted ? i % x.s / size : draw.below(segments)));
}

inline void draw_dense(Draw& draw, Problem& x) {
  x.dense_b = draw.below(2) ? x.b : 1, x.dense_n = draw.below(2) ? x.n : 1, x.dense_t = draw.below(3) ? x.t : 1;
  if (draw.below(3) > 0) return;
  // Runs of keys, so that some tiles are all seen and some are hidden.
  const int64_t run = 1 + draw.below(80), share = 1 + draw.below(4);
  for (int64_t i = 0; i < x.dense_b * x.dense_n * x.dense_t; ++i)
    for (int64_t j = 0; j < x.s; ++j) {
      const bool new_run = j % run == 0 || i % 32 == 0;
      x.dense.push_back(new_run ? draw.below(5) < share : x.dense.back());
    }
}

inline Problem draw_problem(Draw& draw, int64_t t, int64_t s) {
  Problem x{};
  x.t = t, x.s = s;
  x.k = 1 + draw.below(2), x.n = x.k * (1 + draw.below(3));
  x.h = draw.of(WIDTHS), x.v = draw.of(WIDTHS);
  // As many batch rows as make 64 numbers of every result: the float32 error of fewer is luck.
  x.b = 1 + draw.below(2) + 64 / (std::min(x.t, x.s) * x.k * std::min(x.h, x.v));
  x.scale = static_cast<float>(draw.below(8) ? 1 / std::sqrt(x.h) : -0.7);
  x.soft_cap = draw.below(3) ? 0 : 1.5;
  x.query = draw.normal(x.b * x.t * x.n * x.h);
  x.key = draw.normal(x.b * x.s * x.k * x.h);
  x.value = draw.normal(x.b * x.s * x.k * x.v);
  if (draw.below(6) == 0)
    for (double& one : x.value) one *= 1e-6;  // subnormal in float16
  x.cotangent = draw.normal(x.b * x.t * x.n * x.v);
  if (draw.below(3) == 0) x.sinks = draw.normal(x.b * x.n);
  draw_mask(draw, x);
  Draw dense(static_cast<unsigned>(x.t * 1000 + x.s));
  draw_dense(dense, x);
  return x;
}

// The problem of a type: sinks are float32 always.
inline Problem rounded(Problem x, flax_attn::Type type, std::mt19937* coin = nullptr) {
  for (Numbers* array : {&x.query, &x.key, &x.value, &x.cotangent})
    for (double& one : *array) one = rounded(one, type, coin);
  for (double& one : x.sinks) one = rounded(one, flax_attn::Type::float32, coin);
  return x;
}
